"""Recorded run folders (tests/fixtures/runs), put into a home of the test."""

from __future__ import annotations

import sys
from pathlib import Path

RECORDED = Path(__file__).parent / "fixtures/runs/0.1"
KINDS = sorted(path.name for path in RECORDED.iterdir() if (path / "runs").is_dir())


def install(kind: str, home: Path, *, python: Path | str = sys.executable) -> str:
    """Copy a recorded run into `home`, with the paths of that home; its id. Checkpoints stay byte for byte.

    python: of its hosts.
    """
    places = {
        b"/home/alice/.local/state/gangline": str(home).encode(),
        b"/home/alice/.venv/bin/python": str(python).encode(),
        b"/home/alice/model": str(RECORDED / "model").encode(),
    }
    for source in (RECORDED / kind).rglob("*"):
        if source.is_file():
            data = source.read_bytes()
            for there, here in places.items() if "checkpoints" not in source.parts else ():
                data = data.replace(there, here)
            target = home / source.relative_to(RECORDED / kind)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return next((RECORDED / kind / "runs").iterdir()).name

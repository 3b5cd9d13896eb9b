"""The agent as one file in memory: what is sent to a host that has nothing but Python."""

from __future__ import annotations

import importlib.resources
import io
import zipfile
from collections.abc import Iterator
from typing import Any

from gangline.remote.once import once

START = b"""import sys

from gangline.agent.__main__ import main

sys.exit(main(sys.argv[1:]))
"""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The same files make the same bytes, whenever."""


@once
def agent_zipapp() -> bytes:
    """gangline/__init__.py and gangline/agent/ as a program for `python FILE VERB`, from the package's own files.

    Its members are stored as they are: it travels packed as one, which makes it a quarter smaller than one by one.
    """
    package = importlib.resources.files("gangline")
    members = [("__main__.py", START), ("gangline/__init__.py", package.joinpath("__init__.py").read_bytes())]
    members += sorted(_sources(package.joinpath("agent"), "gangline/agent"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _sources(folder: Any, name: str) -> Iterator[tuple[str, bytes]]:
    for child in folder.iterdir():
        path = f"{name}/{child.name}"
        if child.name == "__pycache__":  # it may be another user's, and is none of the agent's
            continue
        if child.is_dir():
            yield from _sources(child, path)
        elif child.name.endswith(".py"):
            yield path, child.read_bytes()

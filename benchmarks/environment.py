"""How long does the environment of one host take, by uv as gangline builds it and by pip from the same wheels?

    python -m benchmarks.environment --out environment.jsonl --rounds 3

The wheels of gangline's own lock for this Python and a host without a GPU are gathered once, by pip as it is set up
here (with `--home`, into a folder that is kept). Then, in turn, each into new folders on the same disk:

cold       gangline's agent builds the environment; uv has unpacked nothing yet
warm       it builds another one with the same packages, as for a lock of which most is the same
pip        `python -m venv` and `pip install --no-index` of the same wheels, as gangline did before it had uv

The figures are seconds from the request to an environment that has been looked through. Exit code 0 if cold is faster
than pip.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gangline.provision.ask import ask_agent
from gangline.provision.requirements import own_lock
from gangline.provision.wheelhouse import Platform, Wheelhouse, gather_wheels
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport

SIDES = ("cold", "warm", "pip")


def gathered(home: Path) -> Wheelhouse:
    """The wheels of gangline's own lock for this Python."""
    major, minor = platform.libc_ver()[1].split(".")[:2]
    kind = Platform(
        version=sys.version_info[:3], machine=platform.machine(), glibc=(int(major), int(minor)), has_gpu=False
    )
    return gather_wheels(own_lock(), kind, home=home)


def by_agent(house: Wheelhouse, folder: Path) -> int:
    """Have the agent build it; the number of packages that it finds there."""
    request = {
        "do": "build",
        "folder": str(folder),
        "python": sys.executable,
        "wheels": str(house.folder),
        "requirements": house.requirements,
        "lock": folder.name,
    }
    host = Host(name="this computer", workdir=str(folder.parent), python=sys.executable)
    return len(ask_agent(LocalTransport(host), "environment", request)["packages"])


def by_pip(house: Wheelhouse, folder: Path) -> int:
    """The same by pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(house.requirements)
    argv = [
        sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index", "--find-links",
        house.folder, "--require-hashes", "--no-compile", "--no-cache-dir", "--quiet", "--requirement", wanted,
    ]  # fmt: skip
    subprocess.run(argv, check=True)
    host = Host(name="this computer", workdir=str(folder.parent), python=sys.executable)
    request = {"do": "contents", "argv": [str(folder / "bin" / "python")], "env": {}}
    return len(ask_agent(LocalTransport(host), "environment", request)["packages"])


def measure(house: Wheelhouse, place: Path) -> dict[str, Any]:
    """One round: each side once."""
    row: dict[str, Any] = {"load": os.getloadavg()[0]}
    for side in SIDES:
        begun_s = time.monotonic()
        build = by_pip if side == "pip" else by_agent
        row["packages"] = build(house, place / side)
        row[side] = time.monotonic() - begun_s
    return row


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="seconds to build the environment of one host")
    parser.add_argument("--out", type=Path, default=Path("environment.jsonl"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, help="where the wheels are kept")
    words = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="gangline-environment-"))
    try:
        house = gathered((words.home or scratch).resolve())
        rows = []
        for number in range(words.rounds):
            row = measure(house, scratch / str(number))
            rows.append(row)
            with words.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            shutil.rmtree(scratch / str(number))
    finally:
        shutil.rmtree(scratch)
    medians = {side: statistics.median(row[side] for row in rows) for side in SIDES}
    for side in SIDES:
        print(f"{side:5} {medians[side]:6.1f} s, worst {max(row[side] for row in rows):.1f} s")
    return 0 if medians["cold"] < medians["pip"] else 1


if __name__ == "__main__":
    sys.exit(main())

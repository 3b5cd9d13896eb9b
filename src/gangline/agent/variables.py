"""Variables that change how ranks talk: those of this process, and those that files of the shell set."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

WATCHED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|MASTER|OMP|UCX)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH"
)
SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|KEY", re.IGNORECASE)
FILES = ("~/.bashrc", "~/.profile", "~/.bash_profile", "~/.zshrc", "~/.zshenv", "/etc/environment")
PROFILES = Path("/etc/profile.d")
FILE_BYTES = 1 << 18
VALUE_LENGTH = 200
NUM_VARIABLES = 100
EXPORT = re.compile(r"\s*(?:export|declare\s+-x|typeset\s+-x)\s+(.*)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def variables(_request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Name, value (null for what sounds like a secret) and where it is set."""
    found = [_row(name, value, "environment") for name, value in sorted(os.environ.items()) if WATCHED.fullmatch(name)]
    for path in [*map(_expanded, FILES), *sorted(PROFILES.glob("*.sh"))]:
        found += [_row(name, value, f"{path}:{number}") for number, name, value in _read(path)]
    return found[:NUM_VARIABLES]


def _row(name: str, value: str, source: str) -> Dict[str, Any]:
    return {"name": name, "value": None if SECRET.search(name) else value[:VALUE_LENGTH], "source": source}


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # nobody knows the home folder
        return Path(path)


def _read(path: Path) -> Iterator[Tuple[int, str, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(FILE_BYTES)
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in assignments(line):
            yield number, name, value


def assignments(line: str) -> List[Tuple[str, str]]:
    """The watched variables that a line of a shell file sets; nothing is expanded."""
    exported = EXPORT.fullmatch(line)
    try:
        words = shlex.split(exported[1] if exported else line, comments=True)
    except ValueError:  # an open quote: the value goes on in the next line
        words = (exported[1] if exported else line).split()
    found = []
    for word in words:
        pair = ASSIGNMENT.fullmatch(word)
        if pair is None:
            break  # a command: what follows are its arguments
        if WATCHED.fullmatch(pair[1]):
            found.append((pair[1], pair[2]))
    return found

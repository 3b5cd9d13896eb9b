"""The agent's work on files and folders (gangline/agent/trees.py), on this computer and on a host."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gangline.errors import GanglineError
from gangline.remote.bootstrap import as_text
from gangline.remote.link import Link
from gangline.remote.ssh_options import printable
from gangline.remote.zipapp import agent_zipapp

ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How much a tree holds."""

    members: int
    """Files and folders."""
    bytes: int
    folder: bool
    """Whether it is a folder, not a file."""


class Here:
    """The work on this computer: the same program, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "agent.pyz"
        if not self._program.exists():
            fresh = folder / f"agent.pyz.{threading.get_ident()}"
            fresh.write_bytes(agent_zipapp())
            fresh.replace(self._program)

    def argv(self, *words: str) -> list[str]:
        """The command of a verb."""
        return [sys.executable, "-I", str(self._program), "trees", *words]

    def do(self, *words: str) -> bytes:
        """Do it; what it says. Raises the error that it met."""
        done = subprocess.run(self.argv(*words), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise_error("this computer", done.stderr)
        return done.stdout


class There:
    """The work on a host."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def do(
        self,
        *words: str,
        data: bytes | Iterator[bytes] = b"",
        on_piece: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Do it; what it says, unless `on_piece` takes that. Raises the error that it met."""
        said = bytearray()
        argv = ["trees", *map(as_text, words)]
        code, stderr = self._link.agent(argv, data=data, on_piece=on_piece or said.extend)
        if code:
            raise_error(self._link.host.name, stderr)
        return bytes(said)


def measured(said: bytes, where: str) -> Measure:
    """What `measure` says."""
    try:
        record = json.loads(said)
        measure = Measure(members=record["members"], bytes=record["bytes"], folder=record["folder"])
        if type(measure.members) is int and type(measure.bytes) is int and type(measure.folder) is bool:
            return measure
    except (ValueError, KeyError, TypeError):
        pass
    raise GanglineError(f"{where}: the size of a folder cannot be understood", seen=printable(repr(said[:100])))


def raise_error(where: str, stderr: bytes) -> NoReturn:
    """Raise what a verb met; its last line says it."""
    last = stderr.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
    try:
        record = json.loads(last)
        number, text, path = record["errno"], printable(str(record["text"])), record["path"]
    except (ValueError, KeyError, TypeError):
        number, text, path = None, printable(last), None
    text = text[:ERROR_CHARACTERS]
    if type(number) is int:
        raise OSError(number, f"{where}: {text}", None if path is None else printable(str(path)))
    raise GanglineError(f"{where}: files cannot be copied", seen=text, fix="see what is said of it above")

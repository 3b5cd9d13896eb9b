"""Somebody at a terminal on a machine of a lab: reads what stands there, types, and waits for the end."""

import os
import pty
import select
import time

from tests.lab.machine import LabHost
from tests.lab.namespaces import end

PATIENCE_S = 90.0


class Typist:
    """A command with a terminal of its own, which it may ask for a password."""

    def __init__(self, machine: LabHost, argv: list[str], *, env: dict[str, str] | None = None) -> None:
        self.text = ""
        """All that stood on the screen."""
        self._seen = 0
        self._ours, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        env = {"TERM": "xterm", "COLUMNS": "300", **(env or {})}
        self._process = machine.popen(["setsid", "--ctty", "--wait", *argv], env=env, **streams)
        os.close(theirs)

    def __enter__(self) -> "Typist":
        return self

    def __exit__(self, *problem: object) -> None:
        end(self._process)
        os.close(self._ours)

    def expect(self, words: str) -> None:
        """Read until these words stand there, behind those of the last call."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.text.find(words, self._seen)) < 0:
            if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0] or not self._read():
                raise AssertionError(f"waited in vain for {words!r}:\n{self.text}")
        self._seen = found + len(words)

    def type(self, words: str) -> None:
        """Type a line."""
        os.write(self._ours, f"{words}\n".encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not self._read():
                break
        return self._process.wait(timeout=PATIENCE_S)

    def _read(self) -> bool:
        try:
            piece = os.read(self._ours, 1 << 16)
        except OSError:  # Linux: nobody has the other end open any more
            return False
        self.text += piece.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(piece)

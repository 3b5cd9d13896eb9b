"""What ssh is told to run on a host, and what is said to it first.

No shell ever reads data: the command is a constant, and everything else travels in frames. The one exception is a
command for a terminal (`remote_command`), whose words travel in hexadecimal.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from gangline.remote.once import once
from gangline.remote.zipapp import agent_zipapp

START_BYTES = 2048
PYTHONS = " ".join(["python3", *(f"python3.{minor}" for minor in range(20, 7, -1))])

_EACH_PYTHON = "for p in " + PYTHONS + "; do command -v $p >/dev/null 2>&1 || continue; "
BOOTSTRAP = (
    f"exec sh -c '{_EACH_PYTHON}"
    f'$p -I -S -c "import sys;sys.version_info<(3,8)and sys.exit(97);exec(sys.stdin.buffer.read({START_BYTES}))"; '
    "r=$?; case $r in 97|126|127);; *) exit $r;; esac; done; exit 97'"
)
"""Runs the program that follows on stdin: START.

Any login shell understands it: one line, no quotes inside quotes, no ! and no \\. A python3 that is too old leaves
with 97, one that is no Python (the stand-in of a version manager) with 126 or 127, before they read anything.
"""

START = """
import os, sys, zlib
def load(stream):
    data = zlib.decompress(stream.read(int(stream.read(16))))
    try:
        descriptor = os.memfd_create("gangline-agent", 0)
    except (AttributeError, OSError):
        import tempfile
        descriptor, path = tempfile.mkstemp(prefix="gangline-agent-")
        os.unlink(path)
        os.set_inheritable(descriptor, True)
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(data)
    sys.path.insert(0, "/proc/self/fd/%d" % descriptor)
    with open("/proc/self/comm", "w") as name:
        name.write("gangline-agent")
load(sys.stdin.buffer)
from gangline.agent.__main__ import main
sys.exit(main(["channel"]))
"""
"""Takes the agent from stdin into a file without a name, and becomes its channel."""

_EXEC = (
    f"exec sh -c '{_EACH_PYTHON}"
    '$p -I -S -c "import sys;sys.exit(sys.version_info<(3,8))" 2>/dev/null && '
    'exec $p -I -S -c "import os,sys;w=bytes.fromhex(sys.argv[1]).split(bytes(1));os.execvp(w[0],w)" "$@"; '
    "done; exit 97' sh"
)
"""Becomes the command that stands behind it in hexadecimal."""


def remote_command(argv: Sequence[str]) -> str:
    """The command line for a remote shell that runs `argv` as it is: the one place where data meets a shell.

    The words travel as one in hexadecimal, with a NUL between them: no shell has a special meaning for 0-9 and a-f.
    """
    words = b"\0".join(_checked(word) for word in argv)
    return f"{_EXEC} {words.hex()}"


def first_words() -> bytes:
    """What is said to a fresh BOOTSTRAP: START, filled up to its length, and the packed agent behind its own length."""
    agent = packed_agent()
    return START.encode().ljust(START_BYTES, b"\n") + b"%016d" % len(agent) + agent


@once
def packed_agent() -> bytes:
    """The agent as it travels."""
    return zlib.compress(agent_zipapp(), 9)


def as_text(word: str | os.PathLike[str]) -> str:
    """A word as JSON takes it, its bytes being utf-8 with lone surrogates, whatever the locale here is.

    Raises ValueError for a NUL, which no command and no path can hold.
    """
    return _checked(word).decode("utf-8", "surrogateescape")


def _checked(word: str | os.PathLike[str]) -> bytes:
    data = os.fsencode(word)
    if b"\0" in data:
        raise ValueError("embedded null byte")
    return data

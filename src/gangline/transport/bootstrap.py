"""What ssh is told to run on a host, and what is said to it first.

No shell ever reads data: the command is a constant, and everything else travels in frames. The one exception is a
command for a terminal (`remote_command`), whose words travel in hexadecimal.
"""

from __future__ import annotations

import importlib.abc
import importlib.resources
import importlib.util
import io
import marshal
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gangline.agent.prepare.key_gate import START_BYTES
from gangline.transport.fanout import once

# The agent as one file in memory: what is sent to a host that has nothing but Python.


ZIPAPP_MAIN = b"""import sys

from %b.__main__ import main

sys.exit(main(sys.argv[1:]))
"""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The same files make the same bytes, whenever."""


@once
def agent_zipapp() -> bytes:
    """gangline/__init__.py and gangline/agent/ as a program for `python FILE VERB`, from the package's own files.

    Without the host half of `gangline prepare`, which is a program of its own.
    """
    return _archive("gangline.agent", _sources_without_prepare())


@once
def compiled_agent_zipapp() -> bytes:
    """The same with the byte code of this version of Python beside the sources, which any other version reads.

    It is four times as large packed, and spares every program on a host 0.03 to 0.2 s: for hosts behind a fast network.
    """
    sources = _sources_without_prepare()
    return _archive("gangline.agent", [*sources, *((f"{name}c", _byte_code(name)) for name, _ in sources)])


def _sources_without_prepare() -> list[tuple[str, bytes]]:
    return [each for each in _agent_sources() if not each[0].startswith(PREPARE)]


def _byte_code(path: str) -> bytes:
    """The file of byte code of a module, which nobody compares with its source: both come in one archive."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    loader = getattr(importlib.util.find_spec(name), "loader", None)
    assert isinstance(loader, importlib.abc.InspectLoader), name
    return importlib.util.MAGIC_NUMBER + b"\x01\0\0\0" + bytes(8) + marshal.dumps(loader.get_code(name))


PREPARE = "gangline/agent/prepare/"
PREPARE_NEEDS = tuple(f"gangline/agent/{name}.py" for name in ("__init__", "bounded", "host_files", "verbs"))


def prepare_zipapp() -> bytes:
    """The host half of `gangline prepare` as a program for `python FILE VERB`."""
    sources = [each for each in _agent_sources() if each[0].startswith(PREPARE) or each[0] in PREPARE_NEEDS]
    return _archive("gangline.agent.prepare", sources)


def _agent_sources() -> Iterator[tuple[str, bytes]]:
    return _sources(importlib.resources.files("gangline").joinpath("agent"), "gangline/agent")


def _archive(package: str, sources: Iterable[tuple[str, bytes]]) -> bytes:
    """A zip archive of sources that Python runs, beginning with the main function of a package.

    Its members are stored as they are: it travels packed as one, which makes it a quarter smaller than one by one.
    """
    init = importlib.resources.files("gangline").joinpath("__init__.py").read_bytes()
    members = [("__main__.py", ZIPAPP_MAIN % package.encode()), ("gangline/__init__.py", init), *sorted(sources)]
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
"""
"""Takes a program from stdin into a file without a name, from which Python then imports."""
CHANNEL = """from gangline.agent.__main__ import main
sys.exit(main(["channel"]))
"""

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
    """What is said to a fresh BOOTSTRAP: the agent, which becomes its channel."""
    return _said(START + CHANNEL, _packed_agent())


def compiled_first_words() -> bytes:
    """The same for a host behind a fast network (`compiled_agent_zipapp`)."""
    return _said(START + CHANNEL, _packed_compiled_agent())


@once
def _packed_agent() -> bytes:
    return zlib.compress(agent_zipapp(), 9)


@once
def _packed_compiled_agent() -> bytes:
    return zlib.compress(compiled_agent_zipapp(), 1)


def _said(start: str, packed: bytes) -> bytes:
    """The program that takes the rest, filled up to its length, and the packed code behind its own length."""
    return start.encode().ljust(START_BYTES, b"\n") + b"%016d" % len(packed) + packed


PREPARE_ARGV = ("python", "-I", "-S", "-c", f"import sys;exec(sys.stdin.buffer.read({START_BYTES}))")
"""Words for the agent on a host: runs what `prepare_words` says on stdin; the request follows there."""


@once
def prepare_words() -> bytes:
    """What is said to PREPARE_ARGV first: the host half of `gangline prepare`, which then answers one request."""
    main = 'from gangline.agent.prepare.__main__ import main\nsys.exit(main(["answer"]))\n'
    return _said(START + main, zlib.compress(prepare_zipapp(), 9))


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

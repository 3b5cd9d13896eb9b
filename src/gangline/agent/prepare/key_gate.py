"""The forced command of keys between hosts (`gangline prepare between`). It is copied to a host, and runs there alone.

sshd starts it in the place of what the other side asked for. It lets in the agent whose digest it knows, and rsync
below the folders that it knows, with the options of gangline; all else is refused with a word, and exit code 96. The
agent is run from what was sent, so that a host needs no copy; nothing of it is run before its digest was compared.

Standard library only, Python >= 3.8, and nothing else of gangline.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Dict, List, NoReturn, Tuple

ADMITTED: Tuple[str, ...] = ()
"""SHA-256 of the agents that are let in, as zip archives. `prepare` writes it here."""
FOLDERS: Tuple[str, ...] = ()
"""Below which rsync may read and write. `prepare` writes them here."""
BOOTSTRAP = ""
"""How gangline asks for its agent. `prepare` writes it here."""
START_BYTES = 2048
"""Of the program that comes before the archive (`gangline.transport.bootstrap`); it is not run."""
REFUSED = 96
"""The exit code."""
MAX_PACKED_BYTES = 4 << 20
MAX_AGENT_BYTES = 16 << 20
MAX_ASKED_BYTES = 1 << 16
SHORT = re.compile(r"-[stLprR]+e[0-9.]*[A-Za-z]*")
"""Of rsync: links followed, times, modes, folders, relative names; what stands behind e is what the other side can."""
LONG = re.compile(r"--timeout=[0-9]{1,6}|--delete(?:-before|-during|-delay|-after)?|--partial|--safe-links")


def refuse(why: str) -> NoReturn:
    """Say why, and leave."""
    sys.stderr.write("gangline: " + why + "\n")
    sys.stderr.flush()
    sys.exit(REFUSED)


def take(num_bytes: int) -> bytes:
    """So many bytes of stdin, and not one more: what follows is for another reader."""
    pieces: List[bytes] = []
    while num_bytes:
        piece = os.read(0, min(num_bytes, 1 << 16))
        if not piece:
            refuse("the other side ended in the middle of a word")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def agent_archive() -> bytes:
    """The agent that the other side sends, if it is one that is let in."""
    take(START_BYTES)
    length = take(16)
    if not length.isdigit() or int(length) > MAX_PACKED_BYTES:
        refuse("what was sent is no agent of gangline")
    unpacker = zlib.decompressobj()
    try:
        archive = unpacker.decompress(take(int(length)), MAX_AGENT_BYTES)
    except zlib.error:
        refuse("what was sent is no agent of gangline")
    if hashlib.sha256(archive).hexdigest() not in ADMITTED:
        refuse("this key lets in another version of gangline; gangline prepare --between-hosts brings it up to date")
    return archive


def run_agent(archive: bytes) -> int:
    """Become the agent's channel, as the program that is sent before it would."""
    try:
        descriptor = os.memfd_create("gangline-agent", 0)
    except (AttributeError, OSError):
        import tempfile

        descriptor, path = tempfile.mkstemp(prefix="gangline-agent-")
        Path(path).unlink()
        os.set_inheritable(descriptor, True)
    with os.fdopen(descriptor, "wb", closefd=False) as memory:
        memory.write(archive)
    sys.path.insert(0, "/proc/self/fd/%d" % descriptor)
    Path("/proc/self/comm").write_text("gangline-agent")
    from gangline.agent.__main__ import main

    return main(["channel"])


def rsync_words(asked: str) -> List[str]:
    """The rsync that is to be run for what the other side asked for; its own words follow on stdin (rsync's -s)."""
    words = asked.split(" ")
    side, options = words[2:-1], words[-1]
    if words[:2] != ["rsync", "--server"] or side not in ([], ["--sender"]) or not SHORT.fullmatch(options):
        refuse("rsync is let in as gangline runs it, and with no other options: " + ascii(asked[:200]))
    if "s" not in options.partition("e")[0]:
        refuse("rsync is let in with -s only")
    told = [os.fsdecode(word) for word in told_words()]
    if told[:1] != ["rsync"] or told[-2:-1] != ["."] or not all(map(LONG.fullmatch, told[1:-2])):
        refuse("rsync is let in as gangline runs it, and with no other options: " + ascii(told)[:200])
    folder = (Path.home() / told[-1]).resolve()
    if not any(root == folder or root in folder.parents for root in roots()):
        refuse("rsync is let in below " + ", ".join(FOLDERS) + " only, not at " + ascii(told[-1]))
    flags, _, rest = options.partition("e")
    return ["rsync", "--server", *side, flags.replace("s", "") + "e" + rest, *told[1:-2], ".", kept_slash(told[-1])]


def told_words() -> List[bytes]:
    """What rsync says by -s: words with a NUL behind each, and an empty one at the end."""
    said = b""
    while not said.endswith(b"\0\0"):
        said += take(1)
        if len(said) > MAX_ASKED_BYTES:
            refuse("rsync says too much")
    return said[:-2].split(b"\0")


def roots() -> List[Path]:
    """The folders, as they lie on this host."""
    return [Path(folder).expanduser().resolve() for folder in FOLDERS]


def kept_slash(path: str) -> str:
    """A path that cannot be taken for an option or a wildcard: it begins with / or with ./."""
    return path if path.startswith("/") else "./" + path


def main(environment: Dict[str, str]) -> int:
    """Entry point; rsync takes this process over."""
    asked = environment.get("SSH_ORIGINAL_COMMAND", "")
    if asked == BOOTSTRAP and BOOTSTRAP:
        return run_agent(agent_archive())
    if asked.startswith("rsync --server "):
        words = rsync_words(asked)
        os.chdir(Path.home())
        os.execvp(words[0], words)  # noqa: S606  (no shell is wanted)
    refuse("this key opens gangline's agent, and rsync below " + ", ".join(FOLDERS) + ", and nothing else")


if __name__ == "__main__":
    sys.exit(main(dict(os.environ)))

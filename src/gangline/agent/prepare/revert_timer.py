"""The timer of a change that may lock out: takes it back on this host unless somebody confirms it in time.

It is a process and a session of its own, and runs the agent from a file beside the journal: neither the end of the
connection nor that of the login ends it. `systemd-run` starts it where systemd is there, outside of the login. A unit
that lies there as long as the timer does the same after a restart of the host.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import List, Tuple

import gangline
from gangline.agent.bounded import run, stretched
from gangline.agent.host_files import sync, write_whole
from gangline.agent.prepare.change_journal import Journal, try_lock
from gangline.agent.verbs import VerbFailed

READY_S = 20.0
PAUSE_S = 0.1
PROGRAM = "agent.pyz"
SYSTEMD = Path("/run/systemd/system")
UNITS = Path("/etc/systemd/system")
AT_BOOT = """\
# A change of gangline prepare waits to be confirmed. This file goes away with the answer.
[Unit]
Description=Take back a change of gangline prepare that nobody confirmed before the restart
DefaultDependencies=no
After=sysinit.target network.target {after}

[Service]
Type=oneshot
ExecStart={python} -I -S {program} revert-at-boot {folder} {txn} {root}
"""
SERVICES = (
    "dbus",
    "systemd-networkd",
    "NetworkManager",
    "nftables",
    "ufw",
    "firewalld",
    "ssh",
    "sshd",
)
"""They have to run before what put a change into force can be taken back."""
MAIN = b"import sys\n\nfrom gangline.agent.prepare.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"


def start(folder: Path, txn: str, *, root: Path) -> None:
    """Start the timer of a transaction in the journal, and wait until it watches; raises VerbFailed, OSError."""
    write_whole(folder / PROGRAM, agent_program())
    argv = [sys.executable, "-I", "-S", str(folder / PROGRAM), "revert-timer", str(folder), txn, str(root)]
    is_system = os.geteuid() == 0 and root == Path("/") and SYSTEMD.is_dir()
    if is_system:
        _also_at_boot(folder, txn, root)
    if not (is_system and _by_systemd(argv, txn)):
        _orphan(argv)
    deadline = time.monotonic() + stretched(READY_S)
    while not is_alive(folder, txn):
        if time.monotonic() > deadline:
            raise VerbFailed(
                "the timer that would take the change back does not start",
                "tried: {}".format(" ".join(argv)),
                "see its log: {}/timer.log".format(folder),
            )
        time.sleep(PAUSE_S)


def _by_systemd(argv: List[str], txn: str) -> bool:
    """Whether systemd started it: then it is no process of the login, which may be ended with all of its processes."""
    try:
        unit = "--unit=gangline-revert-{}".format(txn)
        return run(["systemd-run", "--quiet", "--collect", unit, "--", *argv]).returncode == 0
    except OSError:
        return False


def _boot_files(txn: str) -> Tuple[Path, Path]:
    """The unit that takes a transaction back at the next boot, and the link by which systemd wants it."""
    name = "gangline-revert-{}.service".format(txn)
    return UNITS / name, UNITS / "multi-user.target.wants" / name


def _also_at_boot(folder: Path, txn: str, root: Path) -> None:
    """Have systemd take the transaction back if the host restarts first; it reads the unit then, not now."""
    unit, link = _boot_files(txn)
    words = {"python": sys.executable, "program": folder / PROGRAM, "folder": folder, "txn": txn, "root": root}
    text = AT_BOOT.format(after=" ".join(name + ".service" for name in SERVICES), **words)
    link.parent.mkdir(exist_ok=True)
    write_whole(unit, text.encode())
    link.symlink_to(unit)
    sync(unit.parent)
    sync(link.parent)


def forget(txn: str) -> None:
    """The transaction is confirmed or taken back: the next boot has nothing to do."""
    for path in _boot_files(txn):
        with contextlib.suppress(OSError):
            path.unlink()


def _orphan(argv: List[str]) -> None:
    """Start a program whose parent has ended, in a session of its own."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for target in (0, 1, 2):
                os.dup2(null, target)
            os.closerange(3, 4096)
            os.chdir("/")
            os.execv(argv[0], argv)  # noqa: S606  (no shell is wanted)
    finally:
        os._exit(0)


def agent_program() -> bytes:
    """Our own code as a program for `python FILE VERB`: the archive that runs now, or one made of its folder."""
    archive = getattr(gangline.__loader__, "archive", None)
    if archive:
        return Path(archive).read_bytes()
    package = Path(str(gangline.__file__)).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as program:
        program.writestr("__main__.py", MAIN)
        for path in [package / "__init__.py", *sorted((package / "agent").rglob("*.py"))]:
            program.writestr("gangline/{}".format(path.relative_to(package)), path.read_bytes())
    return buffer.getvalue()


def _lock_path(folder: Path, txn: str) -> Path:
    return folder / "timer-{}.lock".format(txn)


def _release_path(folder: Path, txn: str) -> Path:
    return folder / "timer-{}.confirmed".format(txn)


def is_alive(folder: Path, txn: str) -> bool:
    """Whether the timer of a transaction watches."""
    try:
        descriptor = os.open(str(_lock_path(folder, txn)), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def release(folder: Path, txn: str) -> None:
    """Let the timer end at once; the journal says already that the change is kept."""
    forget(txn)
    if is_alive(folder, txn):
        _release_path(folder, txn).touch(mode=0o600)


def timer_main(argv: List[str]) -> int:
    """`revert-timer FOLDER TXN ROOT`: wait, and take the change back."""
    from gangline.agent.prepare.preparation import expire

    folder, txn, root = Path(argv[0]), argv[1], Path(argv[2])
    log = os.open(str(folder / "timer.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.dup2(log, 2)
    descriptor = os.open(str(_lock_path(folder, txn)), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try_lock(descriptor)
    journal = Journal(folder)
    deadline = _clock() + _revert_s(journal, txn)
    while _clock() < deadline and not _release_path(folder, txn).exists():
        time.sleep(PAUSE_S)
    expire(journal, root, txn)  # which looks whether it was confirmed
    for path in (_release_path(folder, txn), _lock_path(folder, txn)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return 0


def boot_main(argv: List[str]) -> int:
    """`revert-at-boot FOLDER TXN ROOT`: take the change back unless it was confirmed, or its timer still watches."""
    from gangline.agent.prepare.preparation import expire

    folder, txn, root = Path(argv[0]), argv[1], Path(argv[2])
    if not is_alive(folder, txn):
        expire(Journal(folder), root, txn)
    return 0


def _revert_s(journal: Journal, txn: str) -> float:
    return next(float(each.begin["revert_s"]) for each in journal.transactions() if each.txn == txn)


def _clock() -> float:
    """Goes on while the host sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

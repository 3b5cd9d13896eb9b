"""A Python for the hosts of tests whose workers are forked from the zygote, where torch is imported already.

    write_cluster(user, "two", pc1={"python": str(zygote.python)}, ...)

`zygote.python` is a small program in the place of a Python. It hands `-m gangline.worker ...`,
`-m gangline.worker.trace ...` and `-m torch.distributed.run ...` to the zygote, with its environment, folder and
standard streams, and waits: the zygote forks a process that does the work. The program passes signals on, and ends as
that process ends. Where the program is killed, the zygote kills the process. torchrun starts its ranks with this
program again (PYTHON_EXEC). The real Python does everything else. Beside it is a `gangline` whose verbs are forked, too, and
take the program for their own Python, so that what they start on this computer is as quick.

The parent of such a process is the zygote, and its environment as /proc shows it is the zygote's: what looks for
processes of a run finds the program. So supervisors, which outlive the program that started them, have the real
Python. The story of tests/lab/test_story.py takes it for everything.
"""

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

from tests.train.messages import receive, send

WORKER = "gangline.worker"
TRACE = "gangline.worker.trace"
TORCHRUN = "torch.distributed.run"
GANGLINE = "gangline.cli.main"
_MOST_DESCRIPTORS = 4096
_PR_SET_PDEATHSIG = 1
_PROGRAM = """\
#!{python} -IS
import os, sys
python, words = {python!r}, sys.argv[1:]
if words[:3] == ["-P", "-m", {worker!r}]:  # so gangline starts what it asks a Python of this computer
    del words[0]
if words[:1] == ["-u"]:  # so torchrun starts its ranks
    os.environ["PYTHONUNBUFFERED"] = words.pop(0)
if words[:2] == ["-m", {torchrun!r}] or words[:3] == ["-m", {worker!r}, "launch"]:
    os.environ["PYTHON_EXEC"] = sys.argv[0]
if words[:1] != ["-m"] or words[1] not in {{{worker!r}, {trace!r}, {torchrun!r}}}:
    os.execv(python, [python, *words])
executable, imports_from = os.environ.get("PYTHON_EXEC", python), os.getcwd()
"""
_GANGLINE = """\
#!{python} -IS
import os, sys
words, executable, imports_from = ["-m", {gangline!r}, *sys.argv[1:]], {program!r}, {programs!r}
"""
_HAND_OVER = """\
import signal, socket
sys.path.append({folder!r})
from messages import receive, send
PASSED_ON = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
channel = socket.socket(socket.AF_UNIX)
channel.connect({address!r})
socket.send_fds(channel, [b"."], [0, 1, 2])
request = {{"words": words, "executable": executable, "imports_from": imports_from, "umask": os.umask(0)}}
send(channel, {{**request, "environment": dict(os.environ), "folder": os.getcwd()}})
pid = receive(channel)["pid"]
def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in PASSED_ON:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
code = receive(channel)["code"]
if code >= 0:
    os._exit(code)
if -code in PASSED_ON:
    signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
"""


def write_program(folder: Path, address: str) -> Path:
    """The program, which finds the zygote at this address, and `gangline` beside it."""
    path = folder / "python"
    here = str(Path(__file__).parent)
    modules = {"worker": WORKER, "trace": TRACE, "torchrun": TORCHRUN, "gangline": GANGLINE}
    words = {"python": sys.executable, **modules, "folder": here, "address": address, "program": str(path)}
    for file, text in ((path, _PROGRAM), (path.with_name("gangline"), _GANGLINE)):
        file.write_text((text + _HAND_OVER).format(**words, programs=str(folder)), encoding="utf-8")
        file.chmod(0o755)
    return path


class Programs:
    """In the zygote: the processes that it has forked for programs."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waiting: dict[int, tuple[int, int, socket.socket]] = {}
        """By pid: the descriptor of the process, that of its program's connection, and the connection."""

    def descriptors(self) -> list[int]:
        """Where something may come."""
        return [self._listener.fileno(), *(number for *both, _ in self._waiting.values() for number in both)]

    def attend(self, ready: Iterable[int]) -> None:
        """Do what there is to do; returns in this process only."""
        for pid, (process, connection, channel) in list(self._waiting.items()):
            if process in ready:
                self._tell_end(pid)
            elif connection in ready:  # a program says nothing more until it is gone
                _kill(pid)
                channel.close()
                self._waiting[pid] = (process, process, channel)
        if self._listener.fileno() in ready:
            self._fork()

    def _fork(self) -> None:
        channel, _ = self._listener.accept()
        try:
            _, streams, _, _ = socket.recv_fds(channel, 1, 3)
            request = receive(channel)
        except EOFError:
            channel.close()
            return
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be(streams, request, parent=own)
        for stream in streams:
            os.close(stream)
        self._waiting[pid] = (os.pidfd_open(pid), channel.fileno(), channel)
        with contextlib.suppress(BrokenPipeError):
            send(channel, {"pid": pid})

    def _tell_end(self, pid: int) -> None:
        process, _, channel = self._waiting.pop(pid)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # its program is gone
            send(channel, {"code": os.waitstatus_to_exitcode(status)})
        channel.close()


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, which may be gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _kill(pid: int) -> None:
    """The process, and what it has started in its session."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _be(streams, request, *, parent: int):
    """Do the work of a Python that was started with these words; does not return."""
    code = 1
    try:
        _become(streams, request, parent=parent)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - nothing may return into the zygote's loop
        traceback.print_exc()
    finally:
        _leave(code)


def _become(streams, request, *, parent: int) -> None:
    die_with(parent)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, _MOST_DESCRIPTORS)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through="PYTHONUNBUFFERED" in os.environ)
    _, module, *words = request["words"]
    sys.argv = [module, *words]
    sys.executable = request["executable"]
    sys.path[0] = request["imports_from"]
    sys.path[1:1] = folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if any(Path(folder, "gangline").exists() for folder in folders):  # it is to be that one
        for name in [name for name in sys.modules if name.partition(".")[0] == "gangline"]:
            del sys.modules[name]
    if "OMP_NUM_THREADS" in os.environ:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _code_of(end: SystemExit) -> int:
    if isinstance(end.code, str):
        sys.stderr.write(f"{end.code}\n")
        return 1
    return (end.code or 0) & 0xFF


def _leave(code: int) -> None:
    """As an interpreter ends."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)

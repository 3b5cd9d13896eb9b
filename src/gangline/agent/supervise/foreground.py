"""The host agent below a launcher that starts one process on each host, such as mpirun; and that launcher itself.

    foreground offer     < {"request": HostRequest, "epoch": n, "secrets": {name: value}}: give them to the process
                         below, and return once the agent stands; as `host-agent`, it says on stdout why it does not
    foreground below FOLDER      what the launcher starts: be the agent of the part in that folder
    foreground step FOLDER       the same as a task of Slurm, which gives notice by SIGTERM before it ends a task
    foreground launch    < {"folder", "argv", "env", "dialects": [LauncherDialect, ...]}: start the launcher, in a
                         session of its own, by the first dialect whose mark its --version prints; returns once it runs
                         With "serves", a folder: ended with the agent of that part, or after the launcher there.
                         "scratch": a folder that is removed with it
    foreground end       < {"folder"}: end the launcher

The request and its secrets go through a named pipe, so they are on no disk and in no command line. The process that
the launcher has started only waits. The agent is its child, in a session of its own: a launcher that ends takes the
waiting process with it; the agent sees that, has its ranks save and leave, and ends after them.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from gangline.agent.host_files import AGENT_RECORD, EXIT, read_record, write_record
from gangline.agent.supervise import host_agent, processes
from gangline.agent.supervise.detach import Ready, already_started, detach, log_to, own
from gangline.agent.supervise.leases import TAG
from gangline.agent.verbs import VerbFailed, answer

PIPE = "request.pipe"
REFUSED = "refused.json"
WITHDRAWN = "withdrawn"
"""A file that ends an offer: the launcher has failed."""
OFFER_S = 55.0
"""How long an offer waits for its agent: a little shorter than who asked for it."""
TICK_S = 0.05
ENDINGS = ((0, 1.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
"""How a launcher is ended: the signals that it gets, and how long it has to leave after each. 0: by itself."""
FOREIGN = (
    *("OMPI_", "PMIX_", "PMI_", "ORTE_", "PRTE_", "OPAL_", "SLURM_", "HYDRA_", "HYDI_", "MPI_", "MPIR_CVAR_CH3_"),
    *("PDSH_", "RAY_"),
)
"""Variables of launchers. Ranks must not see them: libraries would take them for their own rank and world size."""
VERSION_S = 20.0
"""How long a launcher may take to print its version."""
SITE = ("SLURM_CONF", "PDSH_MODULE_DIR")
"""Variables of the site, without which its commands find nothing."""
LAUNCHER_TAG = "GANGLINE_LAUNCHER"
"""What a launcher starts on the head carries it, where it is not in the launcher's session."""
REMOTE_SHELL = """#!/bin/sh
ssh "$@"
code=$?
if [ $code -ne 0 ]; then
    echo "ssh $* ended with exit code $code" >&2
    echo $code >> "$0.failed"
fi
exit $code
"""
FIX = "look at the log of the launcher on the head"
MISSING = "install it there and on the other hosts, or write `backend: direct` in cluster.yaml"
MAKES = (
    "install OpenMPI, MPICH or Intel MPI (the last two take IPv4 addresses and names only), or write "
    "`backend: direct` in cluster.yaml"
)


def _is_foreign(name: str) -> bool:
    return name.startswith(FOREIGN) and name not in SITE


def main(argv: List[str]) -> int:
    """Entry point."""
    if argv[0] in ("below", "step"):
        return _below(Path(argv[1]), waits=argv[0] == "step")
    return answer({"offer": _offer, "launch": _launch, "end": _end}[argv[0]])


# --- the request, and who waits for it


def _offer(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Give the request to the process below, and return once the agent runs; raises VerbFailed."""
    folder, deadline = Path(asked["request"]["folder"]), time.monotonic() + OFFER_S
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / AGENT_RECORD).exists():
        raise already_started(folder)
    pipe = folder / PIPE
    with contextlib.suppress(FileExistsError):
        os.mkfifo(str(pipe), 0o600)
    try:
        if not _give(pipe, json.dumps(asked).encode(), lambda: _is_over(folder, deadline)):
            raise VerbFailed("the host agent did not start", f"nothing asked for its request within {OFFER_S:g} s", FIX)
        while not (folder / AGENT_RECORD).exists():
            if (folder / REFUSED).exists():
                refused = read_record(folder / REFUSED)
                raise VerbFailed(refused["what"], refused["seen"], refused["fix"])
            if _is_over(folder, deadline):
                raise VerbFailed("the host agent did not start", f"it did not start within {OFFER_S:g} s", FIX)
            time.sleep(TICK_S)
        return {"kind": "result"}
    finally:
        pipe.unlink()


def _is_over(folder: Path, deadline: float) -> bool:
    return time.monotonic() > deadline or (folder / WITHDRAWN).exists()


def _give(pipe: Path, data: bytes, is_over: Callable[[], bool]) -> bool:
    """Write to a pipe once somebody reads it; False if nobody does in time."""
    while not is_over():
        try:
            descriptor = os.open(str(pipe), os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads it yet
                raise
            time.sleep(TICK_S)
            continue
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        return True
    return False


def _take(folder: Path) -> Optional[Dict[str, Any]]:
    """The request that is offered; None if nothing is in time."""
    deadline = time.monotonic() + OFFER_S
    while time.monotonic() < deadline:
        try:
            with (folder / PIPE).open("rb") as stream:
                asked: Dict[str, Any] = json.loads(stream.read())
                return asked
        except (OSError, ValueError):
            time.sleep(TICK_S)
    return None


# --- below the launcher


def _below(folder: Path, *, waits: bool) -> int:
    """Have the agent come up, and wait as long as it lives. Always 0: how it ended stands in its own files, and another
    code would have the launcher end the agents of all hosts.

    waits: hand a SIGTERM on to the agent, and wait until it has left. Slurm kills what a task leaves when it ends.
    """
    launcher = os.getppid()
    notices: List[int] = []
    if waits:
        signal.signal(signal.SIGTERM, lambda *_: notices.append(signal.SIGTERM))
    for name in filter(_is_foreign, list(os.environ)):
        del os.environ[name]
    asked = _take(folder)
    if asked is None:
        return 0
    if own(folder) is None:
        write_record(folder / REFUSED, already_started(folder).record)
        return 0
    request, waiting = asked["request"], os.getpid()
    child = os.fork()
    if child == 0:
        _be_agent(folder, asked, waiting)
    asked.clear()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if os.getppid() != launcher:
            return 0
        while notices:
            os.kill(child, notices.pop())
        time.sleep(TICK_S)
    if not (folder / EXIT).exists() and not (folder / REFUSED).exists():
        host_agent.reap({"request": request})  # it was killed
    return 0


def _be_agent(folder: Path, asked: Dict[str, Any], waiting: int) -> None:
    """Never returns. waiting: the process that ends when the launcher ends."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        log_to(folder)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        host_agent.run(asked, lambda: None, parent=waiting)
    except VerbFailed as failed:
        write_record(folder / REFUSED, failed.record)
    except BaseException as error:  # noqa: BLE001  (its end is ours, and the log keeps it)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(0)


# --- the launcher


def _launch(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Start the launcher in the background, and return once it runs; raises VerbFailed."""
    folder = Path(asked["folder"])
    detach(folder, lambda ready: _run_launcher(folder, asked, ready))
    return {"kind": "result"}


def _run_launcher(folder: Path, asked: Dict[str, Any], ready: Ready) -> None:
    """Run the launcher to its end, and write down how it ended."""
    env = {name: value for name, value in os.environ.items() if name != TAG and not _is_foreign(name)}
    if os.geteuid() == 0:  # without both, OpenMPI refuses to run as root
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.update(asked.get("env") or {})
    argv, shell = asked["argv"], None
    try:
        if asked.get("dialects"):
            dialect = _dialect(argv[0], asked["dialects"], env)
            argv, env, shell = dialect["argv"], dict(env, **dialect["env"]), dialect["remote_shell"]
        if shell:
            Path(shell).write_text(REMOTE_SHELL)
            Path(shell).chmod(0o700)
        with (folder / "launcher.log").open("ab") as log:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
    except OSError as error:
        raise VerbFailed(f"{argv[0]} cannot be started", f"{argv[0]}: {error.strerror}", MISSING) from error
    process = processes.find(child.pid)
    assert process is not None
    write_record(folder / "launcher.json", {"pid": process.pid, "start_ticks": process.start_ticks})
    ready()
    if shell:
        code = _code_of_ssh(child, Path(f"{shell}.failed"), folder)
    elif asked.get("serves"):
        code = _code_of_servant(child, Path(asked["serves"]), folder)
    else:
        code = child.wait()
    mark = f"{LAUNCHER_TAG}={env[LAUNCHER_TAG]}" if LAUNCHER_TAG in env else None
    processes.end_all(lambda: _started_by(child.pid, mark))
    if asked.get("scratch"):
        shutil.rmtree(asked["scratch"], ignore_errors=True)
    write_record(folder / "ended.json", {"returncode": code})


def _started_by(launcher: int, mark: Optional[str]) -> List[processes.Process]:
    """What runs of a launcher that has ended: in its session, or with its mark."""
    own = [each for each in processes.every_process() if each.session == launcher and each.state not in "ZX"]
    return own + (processes.tagged(mark) if mark else [])


def _code_of_servant(child: "subprocess.Popen[bytes]", served: Path, folder: Path) -> int:
    """Wait for a program that others need, and end it when they have ended or do not come. Its exit code."""
    deadline = time.monotonic() + OFFER_S * 2
    while child.poll() is None:
        agent = read_record(served / AGENT_RECORD) or {}
        is_over = (served / "ended.json").exists() or time.monotonic() > deadline
        if agent:
            deadline = float("inf")
            is_over = is_over or not processes.is_alive(agent["pid"], agent["start_ticks"])
        if is_over:
            _end({"folder": folder})
            child.wait()
            return 0
        time.sleep(TICK_S * 4)
    return child.returncode


def _code_of_ssh(child: "subprocess.Popen[bytes]", failed: Path, folder: Path) -> int:
    """Wait for a launcher, and end it when one of its ssh has failed. Its exit code, or that of the ssh."""
    while child.poll() is None:
        if failed.exists():
            _end({"folder": folder})
            child.wait()
            return int(failed.read_text().split()[0])
        time.sleep(TICK_S * 4)
    return child.returncode


def _dialect(program: str, dialects: List[Dict[str, Any]], env: Dict[str, str]) -> Dict[str, Any]:
    """The dialect of a program, by what it says of its version; raises VerbFailed and OSError."""
    try:
        done = subprocess.run(
            [program, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            timeout=VERSION_S,
        )
        said = done.stdout.decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        said = f"nothing within {VERSION_S:g} s"
    for dialect in dialects:
        if dialect["mark"] in said:
            return dialect
    known = ", ".join(repr(dialect["mark"]) for dialect in dialects)
    seen = f"expected one of {known} in what `{program} --version` prints, found: {said[:300] or 'nothing'}"
    raise VerbFailed(f"{program} is of no make that gangline can start here", seen, MAKES)


def _end(asked: Dict[str, Any]) -> Dict[str, Any]:
    """End the launcher, unless it leaves by itself."""
    record = read_record(Path(asked["folder"]) / "launcher.json")
    for number, leave_s in ENDINGS:
        if not record or not processes.is_alive(record["pid"], record["start_ticks"]):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["pid"], number)
        deadline = time.monotonic() + leave_s
        while processes.is_alive(record["pid"], record["start_ticks"]) and time.monotonic() < deadline:
            time.sleep(TICK_S)
    return {"kind": "result"}

"""The supervisor as a process of its own: start one, see whether a run is alive, order a run to end.

Each works for a run whose supervisor is here, and for one on another host (`remote`: the transport to it).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.launch.poll import outlives_agent
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import json_object
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import decode_record, load_record
from gangline.runs.state import RunState, StopOrder, write_leave, write_order
from gangline.supervise import clean
from gangline.supervise.clean import end_without_supervisor
from gangline.supervise.gang_control import NO_SSH_AGENT, SupervisedRun
from gangline.supervise.lock import break_lock, has_supervisor, is_frozen
from gangline.transport.local import LocalTransport, our_python
from gangline.transport.ssh_options import NONSENSE, understood
from gangline.transport.transport import AGENT, CommandResult, Transport

if TYPE_CHECKING:
    from gangline.transport.srun import WaitingStep

START_TIMEOUT_S = 600.0
"""Many hosts, some of which answer slowly."""
OWN_PYTHON = """\
import json, sys
old = {"old": "%d.%d" % sys.version_info[:2]} if sys.version_info < (3, 10) else {}
print(json.dumps({"reasons": [], "program": sys.executable, **old}))
"""
"""What a node of an allocation is asked: it reaches the others by srun, as we do, so that trying it again is idle."""
REACH = """\
import json, runpy, sys
if sys.version_info < (3, 10):
    print(json.dumps({"old": "%d.%d" % sys.version_info[:2]}))
else:
    runpy.run_module("gangline.supervise.control", run_name="__main__", alter_sys=True)
"""
"""Checks the version in the same process: an older Python cannot read our code, and a start takes a while."""


def spawn(run_folder: Path, attempt: int, secrets: Mapping[str, str] | None = None) -> None:
    """Start a detached supervisor, and return once its pid is in state.json and the gang has been started.

    If the attempt runs already without a supervisor, the new one takes it over. `secrets`: more environment for the
    ranks; they are never written to disk. Raises RunFailed when it does not come up: the run has a supervisor, or a
    host agent could not be started.
    """
    here = LocalTransport(Host(name="this computer", workdir="", python=""))
    words = our_python(*_words(run_folder, attempt)[1:])
    try:
        result = here.run(words, stdin=_stdin(secrets), timeout_s=START_TIMEOUT_S)
    except TimeoutError as error:
        raise RunFailed(
            f"the supervisor of {run_folder.name} does not respond during the start",
            seen=str(error),
            fix=f"it may still start the ranks. Check: gangline ps. End it: gangline stop {run_folder.name}",
        ) from error
    _require_started(result, run_folder, attempt)


def spawn_there(
    head: Host, remote: Transport, there: RunLayout, attempt: int, secrets: Mapping[str, str] | None = None
) -> None:
    """As `spawn`, on the head. `there`: the folder of the run on the head, with all its records.

    In an allocation it is a step of its own, which ends with the allocation, and which `cannot_supervise` has begun.
    """
    if head.transport == "srun":
        _spawn_step(head, remote, there, attempt, secrets)
        return
    words = (AGENT, "python", *_words(there.folder, attempt))
    result = _run(remote, words, head, stdin=_stdin(secrets))
    _require_started(result, there.folder, attempt)


def _spawn_step(
    head: Host, remote: Transport, there: RunLayout, attempt: int, secrets: Mapping[str, str] | None
) -> None:
    from gangline.transport.srun import SrunTransport

    step = remote.take_ahead() if isinstance(remote, SrunTransport) else None
    if step is None:
        step = _step(head, str(_own_python(head, remote)["program"]))
    asked = {"run_folder": str(there.folder), "attempt": attempt, "secrets": dict(secrets or {})}
    said = step.tell(json.dumps(asked).encode(), within_s=START_TIMEOUT_S)
    if said.returncode == 0 and (json_object(said.stdout) or {}).get("started"):
        return
    _require_started(dataclasses.replace(said, returncode=said.returncode or 1), there.folder, attempt)


def _step(head: Host, program: str) -> WaitingStep:
    from gangline.transport.srun import WaitingStep

    return WaitingStep(head, (program, "-m", "gangline.supervise", "--step"), env=_own_code(head))


def _words(run_folder: Path, attempt: int) -> tuple[str, ...]:
    return ("-m", "gangline.supervise", str(run_folder), str(attempt), "--detach")


def _stdin(secrets: Mapping[str, str] | None) -> bytes:
    return json.dumps({"secrets": dict(secrets or {})}).encode()


def _require_started(result: CommandResult, run_folder: Path, attempt: int) -> None:
    if result.returncode == 0:
        return
    log = RunLayout.of(run_folder).supervisor_log(attempt)
    said = _error_in(_last_words(result), result.host)
    raise RunFailed(
        f"the supervisor of {run_folder.name} did not start",
        seen=str(said) if said else f"{result.stderr[-2000:].strip() or 'it printed nothing'}; its log is {log}",
        fix="correct the fault that it names, then: gangline resume",
    ) from said


def is_alive(layout: RunLayout, remote: Transport | None = None) -> bool:
    """Whether anything of the run is alive: its supervisor, a host agent, or the ranks of a killed host agent."""
    if remote is not None:
        with understood(remote.host, f"whether {layout.run_id} is alive"):
            return bool(ask_supervisor_host(layout, remote, "alive")["alive"])
    if has_supervisor(layout):
        return True
    with suppress(FileNotFoundError):
        return _runs_somewhere(layout)
    return False


def unfinished(layout: RunLayout, remote: Transport | None = None) -> tuple[str, ...]:
    """Hosts that did not answer when the run ended: processes may be left there. `stop_run` looks again."""
    if remote is not None:
        with understood(remote.host, f"what is left of {layout.run_id}"):
            return tuple(map(str, ask_supervisor_host(layout, remote, "alive")["unfinished"]))
    return clean.unfinished(layout)


def stop_run(layout: RunLayout, order: StopOrder, remote: Transport | None = None) -> None:
    """Order a run to end, and return; `kill`: without saving. Works without a supervisor, too.

    Without a supervisor the host agents get the order from here, and a new supervisor commits and writes the outcome.
    Between two attempts only idle host agents are ended. Of a run that has ended, leftovers on hosts that did not
    answer are ended.
    """
    if remote is not None:
        ask_supervisor_host(layout, remote, order)
        return
    state = _tell(layout, lambda attempt: write_order(layout, order, attempt=attempt))
    if is_frozen(layout):
        break_lock(layout)
    elif has_supervisor(layout):
        return
    if state.phase == "restarting":
        end_without_supervisor(SupervisedRun(layout=layout))
        return
    if state.phase not in {"running", "stopping"}:
        clean.finish_all(SupervisedRun(layout=layout))
        return
    request = load_record(layout.request(state.attempt), LaunchRequest)
    with SupervisedRun(layout=layout).attempt(request, epoch=state.epoch) as gang:
        gang.stop(now=order == "kill")
    with suppress(RunFailed):  # another command was first
        spawn(layout.folder, state.attempt)


def leave_run(layout: RunLayout, hosts: Sequence[str], remote: Transport | None = None) -> None:
    """Ask a run to continue without some of its hosts, and return; raises RunFailed where it has no supervisor."""
    if remote is not None:
        ask_supervisor_host(layout, remote, "leave", *hosts)
        return
    if not has_supervisor(layout) or is_frozen(layout):
        raise RunFailed(
            f"{layout.run_id} has no supervisor, so it cannot continue without {', '.join(hosts)}",
            seen="its supervisor died or does not respond",
            fix=f"save and end it: gangline stop {layout.run_id}; then continue without these hosts: gangline "
            "resume with --cluster",
        )
    _tell(layout, lambda attempt: write_leave(layout, hosts, attempt=attempt))


def _tell(layout: RunLayout, write: Callable[[int], None]) -> RunState:
    """Write an order for the current attempt; the state of that attempt.

    The supervisor may begin the next attempt meanwhile. It writes that into state.json and then reads the orders of the
    attempt before once more: either it sees our order, or we see the new attempt.
    """
    while True:
        state = RunState.load(layout)
        write(state.attempt)
        if RunState.load(layout).attempt == state.attempt:
            return state


def cannot_supervise(cluster: Cluster, remote: Transport) -> list[str]:
    """Why the head cannot supervise a run by itself; [] if it can.

    cluster: as the head sees it, with itself as a local host. The head tries it with the code that will run.
    """
    head = cluster.head
    if head.code is None:
        return [f"gangline's own code is not on {head.name}"]
    try:
        answer = _own_python(head, remote) if head.allocation else _reach(cluster, remote)
        if "old" in answer:
            return [f"the Python of {head.name} is older than 3.10 ({str(answer['old'])[:20]})"]
        if head.allocation:
            _begin_ahead(head, remote, str(answer["program"]))
        return [str(reason) for reason in answer["reasons"]]
    except NONSENSE as error:
        return [f"{head.name} cannot be asked: {error}"]


def _begin_ahead(head: Host, remote: Transport, program: str) -> None:
    """Start the supervisor's step: what it imports takes a while, in which we go on."""
    from gangline.transport.srun import SrunTransport

    if isinstance(remote, SrunTransport):
        remote.begin_ahead(_step(head, program))


def _own_python(head: Host, remote: Transport) -> dict[str, Any]:
    return _answer(_run(remote, (AGENT, "python", "-c", OWN_PYTHON), head))


def _reach(cluster: Cluster, remote: Transport) -> dict[str, Any]:
    stdin = json.dumps(cluster.to_json()).encode()
    return _answer(_run(remote, (AGENT, "python", "-c", REACH, "reach"), cluster.head, stdin=stdin))


def _answer(result: CommandResult) -> dict[str, Any]:
    """The object that it printed; raises ValueError with its last words where there is none."""
    if (said := json_object(result.stdout)) is None:
        raise ValueError(result.stderr.strip()[-500:])
    return said


def ask_supervisor_host(layout: RunLayout, remote: Transport, verb: str, *words: str) -> dict[str, Any]:
    """Run a verb of gangline.supervise.control on the supervisor's host; raises HostUnreachable, RunFailed."""
    with understood(remote.host, f"the hosts of {layout.run_id}"):
        cluster = _cluster_there(layout, remote)
        head = next((host for host in cluster.hosts if host.transport == "local"), cluster.head)
    command = (AGENT, "python", "-m", "gangline.supervise.control", verb, str(layout.folder), *words)
    result = _run(remote, command, head)
    said = _last_words(result)
    if problem := _error_in(said, remote.host):
        raise problem
    if result.returncode:
        raise RunFailed(f"{remote.host} cannot be asked about {layout.run_id}", seen=result.stderr[-2000:].strip())
    return said


def _cluster_there(layout: RunLayout, remote: Transport) -> Cluster:
    try:
        return decode_record(remote.read(layout.cluster), layout.cluster, Cluster, host=remote.host)
    except FileNotFoundError as error:
        raise RunFailed(f"{layout.run_id} is not on {remote.host}", seen=f"no {layout.cluster} there") from error
    except TimeoutError as error:
        raise HostUnreachable(
            f"{remote.host} does not respond in time", seen=str(error), fix="look at its load"
        ) from error


def _run(remote: Transport, words: tuple[str, ...], head: Host, *, stdin: bytes = b"") -> CommandResult:
    """Run our own code on the head; raises HostUnreachable."""
    try:
        return remote.run(words, stdin=stdin, env=_own_code(head), timeout_s=START_TIMEOUT_S)
    except TimeoutError as error:
        raise HostUnreachable(
            f"{remote.host} does not respond in time", seen=str(error), fix="look at its load"
        ) from error


def _own_code(head: Host) -> dict[str, str]:
    """Variables under which a Python of the head finds our own code."""
    # The last variable keeps the others out of the environment of what is started there.
    own = {} if head.code is None else {"PYTHONPATH": head.code, "GANGLINE_OWN_PATH": head.code}
    return NO_SSH_AGENT | own


def _last_words(result: CommandResult) -> dict[str, Any]:
    lines = result.stdout.strip().splitlines()
    return (json_object(lines[-1]) if lines else None) or {}


def _error_in(words: Mapping[str, Any], host: str) -> GanglineError | None:
    """The error in the answer of a command of ours."""
    if not words.get("error"):
        return None
    with understood(host, "why it went wrong"):
        return GanglineError.from_json(words["error"])


def _runs_somewhere(layout: RunLayout) -> bool:
    state = RunState.load(layout)
    request = load_record(layout.request(state.attempt), LaunchRequest)
    with SupervisedRun(layout=layout).attempt(request, epoch=state.epoch) as gang:
        statuses = gang.poll()
        if any(status.phase == "running" for status in statuses):
            return True
        lost = [status.host for status in statuses if status.phase == "lost"]
        return any(outlives_agent(part, gang.transports[part.host]) for part in request.on(lost).hosts)

"""The host agent: owns what was started on one host for one attempt, and leaves nothing behind.

    host-agent          < {"request": HostRequest, "epoch": n, "secrets": {name: value}}: start; returns once it stands
    host-agent standby  < the same: start without ranks, for a part of a later attempt; {"folder": where it rests}
    host-agent reap     < {"request": HostRequest}: end what a host agent that is gone has left

It is detached (own session, no terminal), so that closing a laptop changes nothing. It ends ranks only on an order with
a valid epoch (gangline.agent.supervise.part), once the command it started has ended, or if they have not joined in
time; then every descendant is ended, found by parentage (the host agent is their subreaper) and by the tag in their
environment, never by name. Secrets go into the environment of the command and are written nowhere.

With a warm pool it may rest once these have ended: it keeps the command and its slots, and takes
over its host's part of the next attempt (gangline.agent.supervise.warm_pool). `host-agent` finds it; nothing is started
then.

If it does not stand, it says why in JSON on stdout: {"what", "seen", "fix"}.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

from gangline.agent.host_files import CONSOLE_LOG
from gangline.agent.netprobe import free_ports
from gangline.agent.supervise import processes, warm_pool
from gangline.agent.supervise.detach import Ready, Revive, detach, log_to, own
from gangline.agent.supervise.leases import TAG, Leases, forget
from gangline.agent.supervise.memory_kills import MemoryKills
from gangline.agent.supervise.part import HostPart
from gangline.agent.supervise.sampler import start_sampler
from gangline.agent.supervise.voting import Deputise, require_charge
from gangline.agent.supervise.warm_pool import PreforkedProcesses, has_warm_pool
from gangline.agent.verbs import VerbFailed, answer

# Starting what a host agent owns: one command, in a session of its own, with what a run needs in its environment.


SHIM = "rank_start.py"
"""What stands in front of the ranks of a program that is not ours; the request's command names it in our folder."""
BROUGHT = {SHIM: SHIM, "rank_stacks.py": "path/sitecustomize.py", "script_hooks.py": "hooks/gangline/hooks.py"}
"""Files of ours that such a program meets -> their place in our folder."""
OWN_PATH = "GANGLINE_OWN_PATH"
"""Set where Python's path was set for gangline's own sake: the command shall not see it."""


def start(request: Mapping[str, Any], *, secrets: Mapping[str, str], descriptors: List[int]) -> int:
    """Start the command of a host's request; its pid. Raises VerbFailed. secrets: more environment.

    Its output goes to console.log in the request's folder. descriptors: those that it inherits.
    """
    folder = Path(request["folder"])
    env = {**_compiled(request), **_own_env(), **secrets, **request["env"], TAG: request["folder"]}
    if request.get("program") == "command":
        for made in ("path", "hooks/gangline"):
            (folder / made).mkdir(parents=True, exist_ok=True)
        (folder / "hooks/gangline/__init__.py").touch()
        for name, place in BROUGHT.items():
            (folder / place).write_bytes(pkgutil.get_data("gangline.agent.supervise", name) or b"")
    try:
        with (folder / CONSOLE_LOG).open("ab") as console:
            child = subprocess.Popen(
                list(request["argv"]),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=request.get("cwd") or folder,
                start_new_session=True,
                pass_fds=descriptors,
            )
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else request["argv"][0]
        raise VerbFailed("the gangline agent did not start", seen=f"cannot start {name}: {error.strerror}") from error
    child.returncode = 0  # waitpid(-1) takes its exit code; Popen shall not wait for it
    return child.pid


def _compiled(request: Mapping[str, Any]) -> Dict[str, str]:
    """Where torch.compile and Triton keep what they compiled, unless this user's environment says so.

    By itself that is for torch.compile a folder in the temporary folder, named after the user: whoever makes it first
    decides what runs. For Triton it is the home folder, which on some hosts cannot be written.
    """
    leases = request.get("leases")
    if leases is None:
        return {}
    folder = Path(leases).parents[1] / "compiled"
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def _own_env() -> Dict[str, str]:
    """Our environment without what is there for our own sake."""
    env = dict(os.environ)
    own = env.pop(OWN_PATH, None)
    if own is not None and env.get("PYTHONPATH") == own:
        del env["PYTHONPATH"]
    return env


# Waiting for time to pass, or for a signal: whichever comes first.


class Wake:
    """Wakes on `number`, and on every other signal that has a handler. One per process."""

    def __init__(self, number: int) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> None:
        """Wait for so long, or less."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)


TICK_S = 0.1
REST_TICK_S = 0.05
SUPERVISOR_S = 1.0
STANDING_S = 1.0
"""How often a host agent that rests looks whether all that it holds still runs."""
LEAVE_S = 1.0
"""How long prefork processes may take to leave by themselves; they have nothing to save."""


class HostAgent:
    """One host's part of one attempt, and of later ones that it takes over."""

    def __init__(self, request: Dict[str, Any], *, epoch: int, leases: Leases, parent: Optional[int] = None) -> None:
        self._parent = parent
        """The process whose end means that the launcher above us has ended; None: nothing is above us."""
        self.signal_order: Optional[str] = None
        """The order that a signal to this process stands for."""
        self.exits: Dict[int, int] = {}
        """Exit codes of our own children: the command, and orphans that came back to us."""
        self._leases = leases
        self._pool: Optional[PreforkedProcesses] = None
        if has_warm_pool(request):
            self._pool = PreforkedProcesses(Path(request["folder"]), num_ranks=len(request["ranks"]))
        self._kills = MemoryKills()
        self.part = HostPart(request, epoch=epoch, pool=self._pool, kills=self._kills, complain=_log)
        self._console = self.part.console
        self._folders = [request["folder"]]
        """Of the parts that it has had; the first is in the environment of all that it started."""
        self._secrets: Dict[str, str] = {}
        self._listener: Optional[socket.socket] = None
        """Holds the port where launchers or ranks meet, until one of them listens there."""
        self._look_at = float("-inf")
        """When it is looked next whether the run has a supervisor."""
        self._is_standby = False
        """It has had no ranks yet."""
        self._is_ready = True
        """A rank could be forked at once, and resting.json says so."""
        self._have_stood = True
        """All that it holds has been seen to run."""

    def start(self, secrets: Dict[str, str], *, standby: bool = False) -> None:
        """Start the command, write agent.json and the first status; raises VerbFailed. standby: without ranks."""
        processes.become_subreaper()
        self._is_standby = standby
        self._is_ready = self._have_stood = not standby
        if not standby:
            self._hold_port()
        try:
            if self._pool is not None:
                self._pool.prepare(self.part.request, standby=standby)
        except OSError as error:
            raise VerbFailed("the gangline agent did not start", str(error)) from error
        self._secrets = secrets
        self._guard_supervisor()
        command = processes.find(start(self.part.request, secrets=secrets, descriptors=self._leases.descriptors))
        assert command is not None
        self.command = command
        self._stand()

    def _hold_port(self) -> None:
        """Hold the port where the gang is to meet, on its head; raises VerbFailed where another program has it."""
        meet = self.part.request.get("meet")
        if not meet or 0 not in self.part.request.get("ranks", ()):
            return
        self._leases.claim_port(int(meet[1]))
        try:
            self._listener = free_ports.reserve(int(meet[1]))
        except OSError as error:
            raise VerbFailed(
                "the gangline agent did not start",
                seen=f"another program has taken port {meet[1]}, where the ranks were to meet: {error.strerror}",
                fix=f"start again: another port is chosen then; ss -ltnp shows who listens at {meet[1]}",
            ) from error

    def watch(self) -> None:
        """Follow until nothing is left of what it owns: of its part, and of those that it takes over."""
        self._wake = Wake(signal.SIGCHLD)
        while True:
            if self._is_standby:
                record: Optional[Dict[str, Any]] = self._begin_standby()
            else:
                self._follow()
                record = self._begin_rest()
            if record is None:
                return self._finish()
            if not self._rest():
                return self._end_rest(record)

    def _stand(self) -> None:
        me = processes.this_process()
        launcher = {"torchrun_pid": self.command.pid, "torchrun_start_ticks": self.command.start_ticks}
        identity = {"pid": me.pid, "start_ticks": me.start_ticks, "tag": self._folders[0]}
        self.part.stand(dict(identity, **launcher), slots=self._leases.slots)
        if not self._is_standby:
            start_sampler(self.part.request, slots=self._leases.slots)

    @property
    def _has_ended(self) -> bool:
        """Whether the command has."""
        return self.command.pid in self.exits

    def _pause(self, seconds: float) -> None:
        """Wait for a moment, or until a child has ended; see to it that the run has a supervisor."""
        self._wake.wait(seconds)
        self.exits.update(processes.reap())
        if self._parent is not None and os.getppid() != self._parent:
            self._parent, self.signal_order = None, "stop"
            self.part.lose_launcher()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + SUPERVISOR_S
            self._revive.look()
            self._deputise.look()

    def _guard_supervisor(self) -> None:
        request = self.part.request
        self._revive = Revive(request.get("supervisor"), secrets=self._secrets, complain=_log)
        self._deputise = Deputise(request, secrets=self._secrets, complain=_log)

    def _follow(self) -> None:
        """Until the command has ended, everything is to be killed, or nothing but prefork processes is left."""
        while not self._has_ended and self.part.leaving.order != "kill" and not self.part.is_spent(self.command):
            self._pause(TICK_S)
            self.part.look(self.command, signal_order=self.signal_order)
            self._leases.note([processes.this_process(), self.command, *self.part.ranks.processes.values()])
            if self._listener is not None and self.part.has_met:
                self._listener.close()
                self._listener = None

    def _finish(self) -> None:
        is_spent = not self._has_ended and self.part.leaving.order != "kill"
        self.part.look_last()
        left = processes.end_all(lambda: _belongings(self._folders))
        self.exits.update(processes.reap())
        code = None if is_spent else self.exits.get(self.command.pid, -signal.SIGKILL)
        record = self.part.record(code, exits=self._exits_of_ranks(), left=left)
        if not left:
            self._leases.end()
        self.part.close(record)

    def _begin_rest(self) -> Optional[Dict[str, Any]]:
        """Say how the part ended, and rest; None where that cannot be."""
        if self._has_ended or self.signal_order or not self.part.may_rest or not self._all_stand():
            return None
        self.part.look_last()
        ready = [self.command, *processes.descendants(self.command.pid)]
        pids = {process.pid for process in ready}
        if processes.end_all(lambda: [each for each in _belongings(self._folders) if each.pid not in pids]):
            return None
        record = self.part.record(None, exits=self._exits_of_ranks(), left=0)
        try:
            warm_pool.begin(self.part.request, tag=self._folders[0], holds=ready)
        except OSError:
            return None
        self.part.close(record)
        return record

    def _begin_standby(self) -> Dict[str, Any]:
        """Say that it rests, from its start on; raises OSError."""
        record = self.part.record(None, exits={}, left=0)
        warm_pool.begin(self.part.request, tag=self._folders[0], holds=[self.command], ready=False)
        self.part.close(record)
        return record

    def _note_ready(self) -> None:
        """Say once that ranks can be forked; on a full disk it is said later."""
        if self._is_ready or self._pool is None or not self._pool.all_ready():
            return
        holds = [self.command, *processes.descendants(self.command.pid)]
        with contextlib.suppress(OSError):
            warm_pool.begin(self.part.request, tag=self._folders[0], holds=holds)
            self._is_ready = True

    def _rest(self) -> bool:
        """Until the next part, of which it is the host agent from then on; False once nothing is to be held any
        more.
        """
        now = time.monotonic()
        deadline, look_at = now + warm_pool.may_rest(self.part.request), now + STANDING_S
        while not self._has_ended and self.signal_order is None and now < deadline:
            if self.part.orders.read() in ("stop", "kill"):
                return False
            following = warm_pool.taken(self.part.folder)
            if following is not None:
                return self._take_over(dict(following["request"], env=self.part.request["env"]), following["epoch"])
            if now >= look_at:
                look_at = now + STANDING_S
                if not self._still_stand():
                    return False
                self._note_ready()
            self._pause(REST_TICK_S)
            now = time.monotonic()
        return False

    def _all_stand(self) -> bool:
        return self._pool is not None and self._pool.all_stand(self.command)

    def _still_stand(self) -> bool:
        """Whether all that it holds runs; on standby it is waited for until it does."""
        do_stand = self._all_stand()
        self._have_stood = self._have_stood or do_stand
        return do_stand or not self._have_stood

    def _take_over(self, request: Dict[str, Any], epoch: int) -> bool:
        """Go on as the host agent of this part; False where that cannot be, and then nothing has changed."""
        folder = Path(request["folder"])
        lock = own(folder) if self._all_stand() else None
        if self._pool is None or lock is None:
            return False
        warm_pool.end(self.part.folder)
        self._is_standby, self._is_ready = False, True
        log_to(folder)
        self._leases.pass_on(request, tag=self._folders[0])
        self._folders.append(request["folder"])
        self.part = HostPart(
            request, epoch=epoch, pool=self._pool, kills=self._kills, complain=_log, console_of=self._console
        )
        self._guard_supervisor()
        self._stand()
        os.close(lock)  # agent.json says the same from now on; one more for every attempt would be too many in the end
        self._pool.give(request)
        return True

    def _end_rest(self, record: Dict[str, Any]) -> None:
        """End all that was held ready, and say so."""
        if self._is_standby and self._has_ended:  # by itself, and console.log says why
            record = self.part.record(self.exits[self.command.pid], exits={}, left=0)
        if self._pool is not None:
            self._pool.leave()
        deadline = time.monotonic() + LEAVE_S
        while not self._has_ended and time.monotonic() < deadline:
            self._pause(REST_TICK_S)
        left = processes.end_all(lambda: _belongings(self._folders))
        if not left:
            self._leases.end()
        with contextlib.suppress(OSError):  # it says the same already
            self.part.close(dict(record, left=left))
        warm_pool.end(self.part.folder)

    def _exits_of_ranks(self) -> Dict[int, int]:
        return {pid: code for pid, code in self.exits.items() if pid != self.command.pid}


def main(argv: List[str]) -> int:
    """Entry point; the exit code says whether the host agent runs."""
    verbs = {"reap": reap, "standby": stand_by}
    return answer(verbs[argv[0]] if argv else begin)


def stand_by(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Have a host agent rest on this host that can serve a part like that of a request; raises VerbFailed."""
    request = asked["request"]
    folder = warm_pool.keep(request)
    if folder is None:
        folder = Path(request["folder"])
        try:
            warm_pool.put_aside(folder)
        except OSError as error:
            raise VerbFailed("the gangline agent did not start", str(error)) from error
        detach(folder, lambda ready: run(asked, ready, standby=True))
    return {"kind": "result", "folder": str(folder)}


def begin(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Have the host agent of a request run; raises VerbFailed."""
    request = asked["request"]
    require_charge(request, int(asked.get("epoch", 0)))
    if not warm_pool.hand_over(request, epoch=int(asked.get("epoch", 0))):
        detach(Path(request["folder"]), lambda ready: run(asked, ready))
    return {"kind": "result"}


def run(asked: Dict[str, Any], ready: Ready, *, parent: Optional[int] = None, standby: bool = False) -> None:
    """Be the host agent, to its end; raises VerbFailed if it cannot start. parent, standby: see `HostAgent`."""
    request = asked["request"]
    try:
        leases = Leases()
        try:
            leases.claim(request)
        except OSError as error:
            raise VerbFailed(f"slots cannot be claimed: {error}") from error
        host_agent = HostAgent(request, epoch=int(asked.get("epoch", 0)), leases=leases, parent=parent)
        # The machine shuts down: save and leave, as if ordered.
        signal.signal(signal.SIGTERM, lambda *_: setattr(host_agent, "signal_order", "stop"))
        host_agent.start(asked.pop("secrets", {}), standby=standby)
        ready()
        host_agent.watch()
    except VerbFailed:
        raise
    except BaseException:
        # Whatever it is, nothing may stay behind; the log keeps the cause.
        processes.end_all(lambda: _belongings([request["folder"]]))
        raise


def _log(text: str) -> None:
    sys.stderr.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")
    sys.stderr.flush()


def _belongings(folders: Iterable[str]) -> List[processes.Process]:
    """What was started for parts in these folders and still runs, other than ourselves."""
    found = {process.pid: process for folder in folders for process in processes.tagged(f"{TAG}={folder}")}
    found.update({process.pid: process for process in processes.descendants(os.getpid())})
    return list(found.values())


def reap(asked: Dict[str, Any]) -> Dict[str, Any]:
    """End processes with the tag of a part, unless they serve another part now; raises VerbFailed if one is left."""
    request = asked["request"]
    folder = Path(request["folder"])
    if warm_pool.is_handed(folder):
        return {"kind": "result"}
    tags = {f"{TAG}={name}" for name in (request["folder"], warm_pool.tag_of(request))}
    left = processes.end_all(lambda: [process for tag in tags for process in processes.tagged(tag)])
    if left:
        raise VerbFailed(f"{left} processes cannot be ended", str(folder))
    with contextlib.suppress(OSError):  # a lease that stays written down is looked through by the next who wants it
        forget(request)
        warm_pool.end(folder)
    return {"kind": "result"}

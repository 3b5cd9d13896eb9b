"""The base of backends where one command on the head starts the host agent of every host, such as mpirun or srun.

A backend adds that command (`AgentBackend.launcher`) and what its end means (`JobLauncherBackend.ended`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import PurePath
from typing import Any, ClassVar

from gangline.errors import RunFailed
from gangline.launch.agents import PAUSE_S, UNUSABLE, AgentBackend, Started, on_each, run_starter, start_agent
from gangline.launch.backend import HostStatus, JobLauncher, LaunchRequest, Leftover
from gangline.launch.poll import process_runs, read_record
from gangline.transport.bootstrap import agent_zipapp
from gangline.transport.transport import AGENT, Transport, read_if_there

OFFER = (AGENT, "foreground", "offer")
LAUNCH = (AGENT, "foreground", "launch")
AGENT_FILE = "agent.pyz"
SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
"""Options of the ssh of launchers that use it."""
END_S = 30.0
LATE_S = 3.0
"""How long the end of a launcher is waited for that its agents have seen."""
TAIL_BYTES = 2000


class JobLauncherBackend(AgentBackend):
    """The agents are children of the launcher's processes: when those end, they have their ranks save and exit."""

    program: ClassVar[str]
    """What the launcher is called in errors."""
    remedy: ClassVar[str]
    """What to do where it ended with an exit code other than 0; {host}: the head."""

    def agent(self) -> bytes:
        """The program that every host gets."""
        return agent_zipapp()

    def start_agents(
        self, request: LaunchRequest, transports: Mapping[str, Transport], asked: Mapping[str, Any], begun: Started
    ) -> None:
        """See `AgentBackend.start_agents`. Every host gets its request; the launcher starts its agent."""
        launcher = _of(request)
        self.start_all(request, begun, lambda part: _bring(self.agent(), part.folder, transports[part.host]))
        with ThreadPoolExecutor(max_workers=1) as pool:
            offers = pool.submit(
                self.start_all,
                request,
                begun,
                lambda part: start_agent(part, transports[part.host], asked, argv=OFFER),
            )
            try:
                dialects = [asdict(each) for each in launcher.dialects]
                asked_launcher = {name: getattr(launcher, name) for name in ("folder", "argv", "env")}
                asked_launcher["dialects"] = dialects
                asked_launcher["env"] = {**launcher.env, **self.start_daemons(launcher, transports)}
                run_starter(transports[launcher.host], LAUNCH, asked_launcher, self._unsaid, self._unsaid["fix"], END_S)
                while not wait([offers], PAUSE_S * 4).done:
                    if failure := self.failure(launcher, transports[launcher.host]):
                        raise failure
            except BaseException:
                self._call_off(request, transports)
                raise
            offers.result()

    def withdraw(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """See `AgentBackend.withdraw`."""
        self._call_off(request, transports)
        end_launcher(_of(request).folder, transports[_of(request).host])

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`. Hosts whose ranks exited because the launcher had ended have failed, with its error."""
        statuses = super().poll(request, transports)
        if not any(status.reason == "unlaunched" for status in statuses):
            return statuses
        launcher = _of(request)
        failure = self._failure_soon(launcher, transports[launcher.host])
        lost = ", ".join(status.host for status in statuses if status.reason == "unlaunched")
        failure = failure or RunFailed(
            f"{self.program} on {launcher.host} has lost {lost}",
            seen="the host agents there have ended with their part of it",
            fix=f"its log is {launcher.folder}/launcher.log; then: gangline resume",
        )
        return [
            replace(status, error=failure.to_json(), returncode=status.returncode or 1)
            if status.reason == "unlaunched"
            else status
            for status in statuses
        ]

    def _failure_soon(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """See `failure`. Agents see that the launcher has ended a moment before its end is written."""
        deadline = time.monotonic() + LATE_S
        failure: RunFailed | None = None
        with suppress(*UNUSABLE):
            while (failure := self.failure(launcher, head)) is None and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
        return failure

    def stop(self, request: LaunchRequest, transports: Mapping[str, Transport], *, now: bool, **how: Any) -> list[str]:
        """See `Backend.stop`. It ends by itself with the last agent; one that does not is ended with `now`."""
        missed = super().stop(request, transports, now=now, **how)
        head = request.on({_of(request).host})
        if now and head.names and not set(head.names) & set(missed):
            is_over = super().poll(head, transports)[0].phase not in {"starting", "running"}
            if is_over:
                end_launcher(_of(request).folder, transports[_of(request).host])
        return missed

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        left = super().verify(request, transports)
        launcher = _of(request)
        if launcher.host in request.names and not any(each.host == launcher.host for each in left):
            with suppress(*UNUSABLE):
                record = read_record(transports[launcher.host], PurePath(launcher.folder, "launcher.json"))
                if record is not None and process_runs(transports[launcher.host], record):
                    what = f"process {record['pid']}: {self.program}"
                    left.append(Leftover(host=launcher.host, kind="process", what=what))
        return left

    def start_daemons(self, launcher: JobLauncher, transports: Mapping[str, Transport]) -> Mapping[str, str]:
        """Start what the launcher needs on the hosts; more variables for the launcher, which are on no disk."""
        del launcher, transports
        return {}

    def lost_host(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """What a launcher that still runs says of a host that it cannot reach; None: it ends where it cannot."""
        del launcher, head
        return None

    def _call_off(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """Withdraw the requests that no agent has taken."""
        on_each(
            request, lambda part: transports[part.host].write(PurePath(part.folder, "withdrawn"), b""), timeout_s=END_S
        )

    def failure(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """Why the launcher has ended, or one of its hosts was lost; None while all is well."""
        record = read_record(head, PurePath(launcher.folder, "ended.json"))
        if record is None:
            return self.lost_host(launcher, head)
        code, log = int(record["returncode"]), read_log(launcher, head)[-TAIL_BYTES:].strip()
        if code < 0:
            how = f"was killed by signal {-code}"
            fix = f"find out who ended it on {launcher.host} (a batch system, the kernel for want of memory)"
        else:
            how, fix = f"ended with exit code {code}", self.remedy.format(host=launcher.host)
        return RunFailed(
            f"{self.program} on {launcher.host} {how}, and the host agents with it",
            seen=log or f"it printed nothing; its log is {launcher.folder}/launcher.log",
            fix=f"{fix}; then: gangline resume",
        )

    @property
    def _unsaid(self) -> Mapping[str, str]:
        """The parts of the error that the agent leaves empty."""
        return {
            "what": f"{self.program} did not start",
            "seen": f"expected a running {self.program}",
            "fix": "look at the load and the disk of that host, try again",
        }


def _of(request: LaunchRequest) -> JobLauncher:
    assert request.launcher is not None, "a request that this backend has rendered"
    return request.launcher


def read_log(launcher: JobLauncher, head: Transport) -> str:
    """What the launcher has printed."""
    data = read_if_there(head, PurePath(launcher.folder, "launcher.log")) or b""
    return data.decode(errors="replace")


def _bring(agent: bytes, folder: str, transport: Transport) -> None:
    transport.write(PurePath(folder, AGENT_FILE), agent)


def end_launcher(folder: str, host: Transport) -> None:
    """End what `LAUNCH` has started, if it runs; `verify` covers a host that does not answer."""
    asked = json.dumps({"folder": folder}).encode()
    with suppress(*UNUSABLE):
        host.run((AGENT, "foreground", "end"), stdin=asked, timeout_s=END_S)

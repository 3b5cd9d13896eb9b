"""The backend `mpirun`: one OpenMPI `mpirun` on the head starts the host agent of every host.

For clusters where mpirun is the way onto the hosts. MPI itself is not used: ranks meet as under `direct`. The head
logs in to the other hosts by ssh, without a password, by the addresses in the cluster file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import PurePath
from typing import Any, ClassVar

from gangline.errors import RunFailed, UsageError
from gangline.launch.agents import PAUSE_S, UNUSABLE, AgentBackend, Started, on_each, run_starter, start_agent
from gangline.launch.backend import HostStatus, JobLauncher, LaunchRequest, Leftover, Promises
from gangline.launch.poll import process_runs, read_record
from gangline.runs.cluster import Cluster, Host
from gangline.transport.bootstrap import agent_zipapp
from gangline.transport.transport import AGENT, Transport, read_if_there

OFFER = (AGENT, "foreground", "offer")
LAUNCH = (AGENT, "foreground", "launch")
UNSAID = {
    "what": "mpirun did not start",
    "seen": "expected a running mpirun",
    "fix": "look at the load and the disk of that host, try again",
}
"""The parts of the error that the agent leaves empty."""
AGENT_FILE = "agent.pyz"
END_S = 30.0
TAIL_BYTES = 2000
OPTIONS = (
    *("--bind-to", "none"),  # else every rank of a host is bound to one core
    "--oversubscribe",
    *("--mca", "plm_rsh_agent", "ssh"),
    # A lost host is noticed within 30 s, not after the system's two hours.
    *("--mca", "oob_tcp_keepalive_time", "15"),
    *("--mca", "oob_tcp_keepalive_intvl", "5"),
    *("--mca", "oob_tcp_keepalive_probes", "3"),
)


class MpirunBackend(AgentBackend):
    """The agents are children of mpirun: when it ends, they have their ranks save and exit."""

    name: ClassVar[str] = "mpirun"
    promises: ClassVar[Promises] = Promises(survives_lost_host=False, warm_restart=False, orderly_queue=False)

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`. Raises UsageError where one mpirun cannot reach all hosts."""
        return job_launcher(cluster, request)

    def start_agents(
        self, request: LaunchRequest, transports: Mapping[str, Transport], asked: Mapping[str, Any], begun: Started
    ) -> None:
        """See `AgentBackend.start_agents`. Every host gets its request, and mpirun starts the agents that take it."""
        launcher = _of(request)
        self.start_all(request, begun, lambda part: _bring_agent(part.folder, transports[part.host]))
        with ThreadPoolExecutor(max_workers=1) as pool:
            offers = pool.submit(
                self.start_all,
                request,
                begun,
                lambda part: start_agent(part, transports[part.host], asked, argv=OFFER),
            )
            try:
                asked_launcher = {"folder": launcher.folder, "argv": launcher.argv}
                run_starter(transports[launcher.host], LAUNCH, asked_launcher, UNSAID, UNSAID["fix"], END_S)
                while not wait([offers], PAUSE_S * 4).done:
                    if failure := _failure(launcher, transports[launcher.host]):
                        raise failure
            except BaseException:
                self._call_off(request, transports)
                raise
            offers.result()

    def withdraw(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """See `AgentBackend.withdraw`."""
        self._call_off(request, transports)
        _end(_of(request), transports)

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`. Hosts whose ranks exited because mpirun had ended have failed, with its error."""
        statuses = super().poll(request, transports)
        if not any(status.reason == "unlaunched" for status in statuses):
            return statuses
        launcher = _of(request)
        try:
            failure = _failure(launcher, transports[launcher.host])
        except UNUSABLE:
            failure = None
        failure = failure or RunFailed(
            f"mpirun on {launcher.host} ended while the ranks were running",
            seen="the host agents below it have ended with it",
            fix=f"its log is {launcher.folder}/launcher.log; then: gangline resume",
        )
        return [
            replace(status, error=failure.to_json(), returncode=status.returncode or 1)
            if status.reason == "unlaunched"
            else status
            for status in statuses
        ]

    def stop(self, request: LaunchRequest, transports: Mapping[str, Transport], *, now: bool, **how: Any) -> list[str]:
        """See `Backend.stop`. mpirun ends by itself with the last agent; one that does not is ended with `now`."""
        missed = super().stop(request, transports, now=now, **how)
        head = request.on({_of(request).host})
        if now and not missed and head.hosts and super().poll(head, transports)[0].phase not in {"starting", "running"}:
            _end(_of(request), transports)
        return missed

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        left = super().verify(request, transports)
        launcher = _of(request)
        if launcher.host in request.names and not any(each.host == launcher.host for each in left):
            with suppress(*UNUSABLE):
                record = read_record(transports[launcher.host], PurePath(launcher.folder, "launcher.json"))
                if record is not None and process_runs(transports[launcher.host], record):
                    what = f"process {record['pid']}: mpirun"
                    left.append(Leftover(host=launcher.host, kind="process", what=what))
        return left

    def _call_off(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """Withdraw the requests that no agent has taken."""
        on_each(
            request, lambda part: transports[part.host].write(PurePath(part.folder, "withdrawn"), b""), timeout_s=END_S
        )


def _of(request: LaunchRequest) -> JobLauncher:
    assert request.launcher is not None, "a request that this backend has rendered"
    return request.launcher


def job_launcher(cluster: Cluster, request: LaunchRequest) -> JobLauncher:
    """The mpirun that starts the host agents of a request; raises UsageError where one cannot reach all hosts."""
    hosts = [cluster.host(name) for name in request.names]
    argv = ["mpirun", *OPTIONS, *_network(cluster, hosts)]
    for number, (host, part) in enumerate(zip(hosts, request.hosts, strict=True)):
        address = "localhost" if cluster.is_one_machine else host.address
        below = ("python3", f"{part.folder}/{AGENT_FILE}", "foreground", "below", part.folder)
        argv += [*([":"] if number else []), "-np", "1", "--host", address, *below]
    head = request.hosts[0]
    folder = str(PurePath(head.rank_files) / "mpirun")
    return JobLauncher(host=head.host, folder=folder, argv=tuple(argv))


def _network(cluster: Cluster, hosts: Sequence[Host]) -> list[str]:
    """How mpirun reaches the hosts: one user and one port for all of them, and only the addresses that are known."""
    if cluster.is_one_machine:
        return []
    others = hosts[1:]
    users = {(host.ssh or "").rpartition("@")[0] for host in others}
    ports = {host.ssh_port for host in others}
    if len(users) > 1 or len(ports) > 1:
        raise UsageError(
            "mpirun cannot reach all hosts of this cluster",
            seen="their users or ssh ports differ; it uses the same ones for every host",
            fix="write the same user and port at every host, or `backend: direct`",
        )
    ssh = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
    ssh += [word for user in users if user for word in ("-l", user)]
    ssh += [word for port in ports if port for word in ("-p", str(port))]
    words = ["--mca", "plm_rsh_args", " ".join(ssh)]
    if all(_is_ipv4(host.address) for host in hosts):
        words += ["--mca", "oob_tcp_if_include", ",".join(f"{host.address}/32" for host in hosts)]
    return words


def _is_ipv4(address: str) -> bool:
    try:
        IPv4Address(address)
    except ValueError:
        return False
    return True


def _bring_agent(folder: str, transport: Transport) -> None:
    transport.write(PurePath(folder, AGENT_FILE), agent_zipapp())


def _failure(launcher: JobLauncher, head: Transport) -> RunFailed | None:
    """Why mpirun has ended; None while it runs."""
    record = read_record(head, PurePath(launcher.folder, "ended.json"))
    if record is None:
        return None
    code = int(record["returncode"])
    data = read_if_there(head, PurePath(launcher.folder, "launcher.log")) or b""
    log = data[-TAIL_BYTES:].decode(errors="replace").strip()
    if code < 0:
        how = f"was killed by signal {-code}"
        fix = f"find out who ended it on {launcher.host} (a batch system, the kernel for want of memory)"
    else:
        how = f"ended with exit code {code}"
        fix = (
            f"on {launcher.host}, `ssh ADDRESS true` has to work for the address of every other host, and OpenMPI has "
            "to be installed on all of them; or write `backend: direct`"
        )
    return RunFailed(
        f"mpirun on {launcher.host} {how}, and the host agents with it",
        seen=log or f"it printed nothing; its log is {launcher.folder}/launcher.log",
        fix=f"{fix}; then: gangline resume",
    )


def _end(launcher: JobLauncher, transports: Mapping[str, Transport]) -> None:
    """End mpirun, if it runs; `verify` covers a head that does not answer."""
    asked = json.dumps({"folder": launcher.folder}).encode()
    with suppress(*UNUSABLE):
        transports[launcher.host].run((AGENT, "foreground", "end"), stdin=asked, timeout_s=END_S)

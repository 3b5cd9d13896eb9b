"""The backend `ray`: an actor on every node of a cluster of Ray holds the host agent.

With `RAY_ADDRESS` in the head's variables that cluster is used. Without it gangline starts one over the hosts, with a
token of its own, and ends it with the run. The program is the head's Python, which has to have Ray.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, ClassVar

from gangline.errors import RunFailed, UsageError
from gangline.launch.agents import UNUSABLE, run_starter
from gangline.launch.backend import JobLauncher, LauncherDaemon, LaunchRequest, Leftover, Promises
from gangline.launch.job_launcher import AGENT_FILE, END_S, LAUNCH, JobLauncherBackend, end_launcher, read_log
from gangline.launch.poll import process_runs, read_record
from gangline.runs.cluster import Cluster, Host
from gangline.transport.fanout import fan_out
from gangline.transport.transport import Transport, read_if_there

RAY_ADDRESS = "RAY_ADDRESS"
OF_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")
"""Variables of a host that its part of Ray gets."""
NODE_ENV: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # a node ends so long after the first one
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
ADDRESS = "ADDRESS"
NODE_START_S = 30.0
PAUSE_S = 0.2
ADDRESSES = re.compile(r"auto|[^/\s]+:\d+")
LOST = re.compile(r"^lost the actor on (\S+): (.*)$", re.MULTILINE)
ERROR = re.compile(r'^\{"kind": "error".*\}$', re.MULTILINE)


class RayBackend(JobLauncherBackend):
    """The agents are children of Ray's actors."""

    name: ClassVar[str] = "ray"
    promises: ClassVar[Promises] = Promises(warm_restart=False, orderly_queue=False)
    program: ClassVar[str] = "ray"
    remedy: ClassVar[str] = "the log of the program on {host} and those of Ray say more"

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`."""
        head_part, head = request.hosts[0], cluster.host(request.hosts[0].host)
        folder = str(PurePath(head_part.rank_files) / self.program)
        address = _address_of(head)
        hosts = []
        for part in request.hosts:
            host = cluster.host(part.host)
            ranks = len(part.ranks) if address else 0
            gpus = 0 if host.gpu == {} else min(ranks, len(set(part.devices)))
            where = "" if cluster.is_one_machine else host.address
            hosts.append({"host": part.host, "address": where, "folder": part.folder, "ranks": ranks, "gpus": gpus})
        daemons = () if address else _daemons(cluster, request, folder)
        asked = {"address": address, "node": daemons[0].folder if daemons else None, "hosts": hosts}
        argv = head.argv(f"{head_part.folder}/{AGENT_FILE}", "ray", "drive", json.dumps(asked))
        env = {name: head.env[name] for name in OF_RAY if name in head.env}
        return JobLauncher(host=head.name, folder=folder, argv=argv, env=env, daemons=daemons)

    def start_daemons(self, launcher: JobLauncher, transports: Mapping[str, Transport]) -> Mapping[str, str]:
        """See `JobLauncherBackend.start_daemons`: the nodes of a cluster of our own, and the token of all of them."""
        if not launcher.daemons:
            return {}
        first, *others = launcher.daemons
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._start_node(first, transports, token, "")
        address = self._address(first, transports[first.host])
        starts = fan_out(
            lambda node: self._start_node(node, transports, token, address),
            {node.host: node for node in others},
            timeout_s=END_S * 2,
        )
        for outcome in starts.values():
            outcome.get()
        return token

    def _start_node(
        self, node: LauncherDaemon, transports: Mapping[str, Transport], token: Mapping[str, str], address: str
    ) -> None:
        argv = (*node.argv[:-1], node.argv[-1].replace(f'"{ADDRESS}"', f'"{address}"'))
        asked = {"folder": node.folder, "argv": argv, "env": {**node.env, **token}, "dialects": []}
        asked |= {"serves": node.serves, "scratch": node.scratch}
        run_starter(transports[node.host], LAUNCH, asked, self._unsaid, self._unsaid["fix"], END_S)

    def _address(self, node: LauncherDaemon, head: Transport) -> str:
        deadline = time.monotonic() + NODE_START_S
        while time.monotonic() < deadline:
            if record := read_record(head, PurePath(node.folder, "address.json")):
                return str(record["address"])
            if read_record(head, PurePath(node.folder, "ended.json")):
                break
            time.sleep(PAUSE_S)
        log = _node_log(node, head)
        if said := _said(log):
            raise said
        raise RunFailed(
            f"{node.host}: the first node of Ray did not start",
            seen=log[-2000:] or f"expected its address within {NODE_START_S:g} s",
            fix=f"its log is {node.folder}/launcher.log",
        )

    def withdraw(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """See `AgentBackend.withdraw`."""
        super().withdraw(request, transports)
        assert request.launcher is not None
        fan_out(
            lambda node: end_launcher(node.folder, transports[node.host]),
            {node.host: node for node in request.launcher.daemons},
            timeout_s=END_S * 2,
        )

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        left = super().verify(request, transports)
        assert request.launcher is not None
        silent = {each.host for each in left if each.kind == "unknown"}
        for node in request.launcher.daemons:
            if node.host not in request.names or node.host in silent:
                continue
            with suppress(*UNUSABLE):
                record = read_record(transports[node.host], PurePath(node.folder, "launcher.json"))
                if record is not None and process_runs(transports[node.host], record):
                    left.append(Leftover(host=node.host, kind="process", what=f"process {record['pid']}: ray start"))
        return left

    def failure(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """See `JobLauncherBackend.failure`: the error that the program itself has found comes first."""
        failure = super().failure(launcher, head)
        return failure and (_said(read_log(launcher, head)) or failure)

    def lost_host(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """See `JobLauncherBackend.lost_host`."""
        lost = LOST.findall(read_log(launcher, head))
        if not lost:
            return None
        return RunFailed(
            f"ray on {launcher.host} has lost {', '.join(host for host, _ in lost)}",
            seen="\n".join(f"{host}: {why}" for host, why in lost),
            fix="`ray status` says which nodes are there; then: gangline resume",
        )


def _address_of(head: Host) -> str | None:
    """The address of a cluster that is there; None: there is none yet."""
    address = head.env.get(RAY_ADDRESS)
    if address is None or ADDRESSES.fullmatch(address):
        return address
    raise UsageError(
        f"{head.name}: RAY_ADDRESS is no address of a cluster of Ray",
        seen=f"expected HOST:PORT or auto, found {address}",
        fix="write the address that `ray start --head` printed: the head is a node of the cluster, not a client",
    )


def _daemons(cluster: Cluster, request: LaunchRequest, launcher: str) -> tuple[LauncherDaemon, ...]:
    """The nodes of a cluster of our own: one on each computer."""
    made = []
    token = hashlib.sha256(launcher.encode()).hexdigest()[:12]
    scratch = f"/tmp/gangline-ray-{token}"  # noqa: S108  (paths of sockets have 107 letters at the most)
    for number, part in enumerate(request.hosts[:1] if cluster.is_one_machine else request.hosts):
        host = cluster.host(part.host)
        folder = f"{part.folder}/ray"
        asked: dict[str, Any] = {
            "ip": "" if cluster.is_one_machine else host.address,
            "folder": folder,
            "scratch": scratch,
            "address": ADDRESS if number else None,
        }
        made.append(
            LauncherDaemon(
                host=host.name,
                folder=folder,
                argv=host.argv(f"{part.folder}/{AGENT_FILE}", "ray", "node", json.dumps(asked)),
                env={**NODE_ENV, "GANGLINE_LAUNCHER": folder},
                serves=part.folder if number else launcher,
                scratch=scratch,
            )
        )
    return tuple(made)


def _node_log(node: LauncherDaemon, host: Transport) -> str:
    return (read_if_there(host, PurePath(node.folder, "launcher.log")) or b"").decode(errors="replace").strip()


def _said(log: str) -> RunFailed | None:
    """The error that a program of ours has written into its log."""
    found = ERROR.findall(log)
    if not found:
        return None
    with suppress(ValueError, KeyError):
        record = json.loads(found[-1])
        return RunFailed(str(record["what"]), seen=str(record["seen"]), fix=f"{record['fix']}; then: gangline resume")
    return None

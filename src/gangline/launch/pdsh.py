"""The backend `pdsh`: one pdsh on the head starts the host agent of every host, for sites where that is the way in.

The head logs in by ssh, without a password, by the addresses in the cluster file: to the other hosts and to itself, as
pdsh does everywhere. Where all hosts are this computer, its module `exec` starts them without ssh.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import ClassVar

from gangline.errors import RunFailed, UsageError
from gangline.launch.backend import JobLauncher, LaunchRequest, Promises
from gangline.launch.job_launcher import AGENT_FILE, SSH, JobLauncherBackend, read_log
from gangline.runs.cluster import Cluster, Host
from gangline.transport.transport import Transport

PICK = (
    "import os, sys; "
    "place = dict(zip(sys.argv[2::2], sys.argv[3::2]))[sys.argv[1]]; "
    f'os.execv(sys.executable, [sys.executable, place + "/{AGENT_FILE}", "foreground", "below", place])'
)
"""What pdsh starts on every host; behind it stand the host's name for pdsh, and pairs of such a name and the folder of
its agent: pdsh gives the same words to all hosts."""
NOTICES = ("-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=40")
"""A host may be cut off for as long as the run's supervisor waits for it; an idle connection is not forgotten on its
way."""
LOST = re.compile(r"^pdsh@\S+: (\S+): ssh (?:exited with exit code (\d+)|killed by signal \d+)$", re.MULTILINE)
"""What pdsh prints of a connection that has ended with an error; it goes on with the other hosts."""
NO_CONNECTION = "255"
"""ssh's own exit code; every other one is that of the command on the host."""


class PdshBackend(JobLauncherBackend):
    """The agents are at the ends of pdsh's connections, of which each lives by itself."""

    name: ClassVar[str] = "pdsh"
    promises: ClassVar[Promises] = Promises(warm_restart=False, orderly_queue=False)
    program: ClassVar[str] = "pdsh"
    remedy: ClassVar[str] = (
        "on {host}, `ssh ADDRESS true` has to work for the address of every host, its own included "
        "(`gangline prepare --between-hosts` gives it a key for the others); or write `backend: direct`"
    )

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`. Raises UsageError where one pdsh cannot reach all hosts."""
        hosts = [cluster.host(name) for name in request.names]
        folder = str(PurePath(request.hosts[0].rank_files) / self.program)
        is_local = cluster.is_one_machine
        names = [host.name if is_local else host.address for host in hosts]
        folders = [part.folder for part in request.hosts]
        places = [_literal(word) for pair in zip(names, folders, strict=True) for word in pair]
        words = ["python3", "-c", PICK, "%h", *places]
        argv = ["pdsh", "-b", "-S", "-R", "exec" if is_local else "ssh", "-f", str(len(hosts))]
        if is_local:
            return JobLauncher(host=hosts[0].name, folder=folder, argv=(*argv, "-w", ",".join(names), *words))
        _require_reachable(hosts)
        targets = ["@".join(filter(None, (_user(host), host.address))) for host in hosts]
        # exec: else a shell would stand between the connection and the process that waits for its end
        argv += ["-w", ",".join(targets), "exec", *map(shlex.quote, words)]
        options = ("-a", "-x", *SSH, *NOTICES, *_port(hosts[0]), "-l%u", "%h")
        env = {"PDSH_SSH_ARGS": " ".join(options), "GANGLINE_LAUNCHER": folder}
        return JobLauncher(host=hosts[0].name, folder=folder, argv=tuple(argv), env=env)

    def lost_host(self, launcher: JobLauncher, head: Transport) -> RunFailed | None:
        """See `JobLauncherBackend.lost_host`."""
        log = read_log(launcher, head)
        ends = {found[1]: found[2] for found in LOST.finditer(log)}
        if not ends:
            return None
        unreached = [address for address, code in ends.items() if code == NO_CONNECTION]
        named = unreached or list(ends)
        if unreached:
            what = f"pdsh on {launcher.host} has no connection to {', '.join(named)}"
            fix = self.remedy.format(host=launcher.host)
        else:
            what = f"what pdsh on {launcher.host} started on {', '.join(named)} has ended"
            fix = f"on {launcher.host}, `ssh ADDRESS python3 --version` has to work for that address"
        lines = [line for line in log.splitlines() if any(f"{address}: " in line for address in named)]
        return RunFailed(what, seen="\n".join(lines[-20:]), fix=f"{fix}; then: gangline resume")


def _require_reachable(hosts: Sequence[Host]) -> None:
    """Raise UsageError for hosts that one pdsh cannot name."""
    if len({host.ssh_port for host in hosts}) > 1:
        raise UsageError(
            "pdsh cannot reach all hosts of this cluster",
            seen="their ssh ports differ; pdsh has one for all hosts",
            fix="write the same port at every host, or `backend: direct`",
        )
    for host in hosts:
        if ":" in host.address:
            raise UsageError(
                f"pdsh cannot reach {host.name}",
                seen=f"its address is {host.address}; a colon has another meaning for pdsh",
                fix="write its name or its IPv4 address into the cluster file, or `backend: direct`",
            )


def _user(host: Host) -> str:
    return (host.ssh or "").rpartition("@")[0]


def _port(host: Host) -> tuple[str, ...]:
    return ("-p", str(host.ssh_port)) if host.ssh_port else ()


def _literal(word: str) -> str:
    """A word in which pdsh replaces nothing."""
    return word.replace("%", "%%")

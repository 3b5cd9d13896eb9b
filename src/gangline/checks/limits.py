"""Does the system let ranks have what they need?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Rule, adders
from gangline.inventory.facts import UNLIMITED, HostFacts
from gangline.runs.cluster import Host
from gangline.units import format_bytes

MIN_FILES = 1024
MIN_PROCESSES = 1024
MIN_MEMLOCK_BYTES = 1 << 30
"""RDMA pins every buffer that it sends from."""
MIN_SHM_BYTES = 1 << 30


RULES: list[Rule] = []
each_host, _ = adders(RULES)


@each_host.warn(
    "E-LIM-01",
    title="few files may be open at once",
    meaning="data loaders and many ranks end with `Too many open files`",
    fix="raise `nofile` in /etc/security/limits.conf there, log in anew",
    step="limits",
)
def _files(facts: HostFacts, _host: Host) -> Iterator[str]:
    soft, hard = facts.limits.nofile_soft, facts.limits.nofile_hard
    if soft is not None and soft != UNLIMITED and soft < MIN_FILES:
        yield f"ulimit -n is {soft}, at most {'unlimited' if hard == UNLIMITED else hard}"


@each_host.warn(
    "E-LIM-02",
    title="little memory may be locked, although there is RDMA",
    meaning="NCCL cannot register its buffers and ends with `ibv_reg_mr failed` or `Cannot allocate memory`",
    fix="set `memlock` to unlimited in /etc/security/limits.conf there, log in anew; in a container: "
    "--ulimit memlock=-1",
    step="limits",
)
def _locked(facts: HostFacts, _host: Host) -> Iterator[str]:
    soft = facts.limits.memlock_soft
    if facts.rdma.active and soft is not None and soft != UNLIMITED and soft < MIN_MEMLOCK_BYTES:
        yield f"ulimit -l is {format_bytes(soft)}, and {facts.rdma.active[0].name} is active"


@each_host.warn(
    "E-LIM-03",
    title="little shared memory",
    meaning="NCCL between the GPUs of one host and data loaders with workers end with a bus error",
    fix="in a container: --shm-size=8g or --ipc=host; else: sudo mount -o remount,size=8g /dev/shm",
    step="limits",
)
def _shared_memory(facts: HostFacts, _host: Host) -> Iterator[str]:
    total = facts.limits.shm_total_bytes
    if total is not None and total < MIN_SHM_BYTES:
        yield f"{format_bytes(total)} in /dev/shm"


@each_host.warn(
    "E-LIM-04",
    title="few processes may run at once",
    meaning="threads count, too: ranks end with `Resource temporarily unavailable`",
    fix="raise `nproc` in /etc/security/limits.conf there, log in anew",
)
def _processes(facts: HostFacts, _host: Host) -> Iterator[str]:
    soft = facts.limits.nproc_soft
    if soft is not None and soft != UNLIMITED and soft < MIN_PROCESSES:
        yield f"ulimit -u is {soft}"


@each_host.warn(
    "E-LIM-05",
    title="processes are ended at logout",
    meaning="a run there ends as soon as the last connection to the host does",
    fix="there, once: loginctl enable-linger",
)
def _logout(facts: HostFacts, host: Host) -> Iterator[str]:
    if host.transport == "ssh" and facts.system.kill_user_processes and not facts.system.linger:
        yield "KillUserProcesses=yes in systemd's logind.conf, and the user does not linger"


@each_host.warn(
    "E-LIM-06",
    title="other users' runs leave too few cores",
    meaning="a start on CPU slots is refused where all users together would have more of them than there are cores",
    fix="wait for it, or ask that user; or give this host fewer slots",
)
def _cores(facts: HostFacts, host: Host) -> Iterator[str]:
    taken = [lease for lease in facts.leases if lease.slot == "cpu"]
    if taken and not facts.gpus and len(taken) + host.slots > facts.num_cpus:
        yield f"{len(taken)} of {facts.num_cpus} cores: {', '.join(dict.fromkeys(lease.words for lease in taken))}"


# Is there memory to work in?


WARN_BYTES = 1 << 30
"""Importing torch and transformers alone takes about half of this per rank."""
SMALL_LIMIT_BYTES = 8 << 30


@each_host.warn(
    "E-MEM-01",
    title="little memory available",
    meaning="a rank may be ended by the kernel while it loads the model",
    fix="end other programs there, or give this host fewer slots",
)
def _little(facts: HostFacts, _host: Host) -> Iterator[str]:
    available = facts.memory_available_bytes
    if available is not None and available < WARN_BYTES:
        yield f"{format_bytes(available)} available"


@each_host.warn(
    "E-MEM-02",
    title="far less memory may be used than there is",
    meaning="a rank that reaches the limit is killed, although `free` shows room",
    fix="raise the memory limit of the container or service, or give this host fewer slots",
)
def _limited(facts: HostFacts, _host: Host) -> Iterator[str]:
    """A container with a limit that is large enough is nothing to talk about."""
    limit, total = facts.system.memory_limit_bytes, facts.memory_total_bytes
    if limit is not None and total is not None and limit < min(total / 2, SMALL_LIMIT_BYTES):
        yield f"{format_bytes(limit)} of {format_bytes(total)}, by a control group"

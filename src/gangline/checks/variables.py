"""Do variables that somebody set once do harm, or nothing?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gangline.checks.rules import Evidence, Rule, Seen, adders, pairs
from gangline.inventory.facts import HostFacts, Inventory, Variable
from gangline.runs.cluster import Cluster, Host

CLUSTER_FILE = "cluster.yaml"
DEAD = {
    "NCCL_TIMEOUT": "neither NCCL nor torch reads it",
    "NCCL_TIMEOUT_MS": "neither NCCL nor torch reads it",
    "GLOO_TIMEOUT": "gloo does not read it",
    "TORCH_DISTRIBUTED_TIMEOUT": "torch does not read it",
}
"""Variables of guides that no program looks at (torch 2.13: searched in its libraries)."""
RANKS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
}


RULES: list[Rule] = []
each_host, whole_cluster = adders(RULES)


def _said(facts: HostFacts, host: Host, *names: str) -> list[tuple[Variable, str]]:
    """Variables of these names with their values, wherever they are set. Our own last word is in the cluster file."""
    ours = [Variable(name=name, value=value, source=CLUSTER_FILE) for name, value in host.env.items()]
    found = {(row.name, row.value, row.source): row for row in (*facts.variables, *ours) if row.name in names}
    return [(row, row.value or "") for row in found.values()]


def _words(row: Variable) -> str:
    value = "..." if row.value is None else row.value
    return f"{row.name}={value} in {row.source}"


@each_host.warn(
    "E-ENV-01",
    title="{name} does nothing",
    meaning="no program reads it; collectives wait as long as the job says",
    fix="delete the line",
)
def _dead(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    for row, _ in _said(facts, host, *DEAD):
        yield f"{_words(row)}; {DEAD[row.name]}", {"name": row.name}


def _unfit(
    facts: HostFacts, host: Host, name: str, fits: Callable[[str, HostFacts], bool], *, certain: bool
) -> Iterator[Evidence]:
    """Where a variable names no interface of the host. certain: it is in the cluster file, which has the last word."""
    for row, value in _said(facts, host, name):
        if facts.nics and value and (row.source == CLUSTER_FILE) == certain and not fits(value, facts):
            yield f"{_words(row)}; it has {', '.join(nic.name for nic in facts.nics[:8])}", {"name": row.name}


def _nccl_fits(value: str, facts: HostFacts) -> bool:
    """NCCL's rules: a list of beginnings of names; = before it: whole names; ^: all but these."""
    exact = value.startswith(("=", "^="))
    names = [name for name in value.lstrip("^=").split(",") if name]
    hits = [
        nic.name
        for nic in facts.nics
        if any(nic.name == name or (not exact and nic.name.startswith(name)) for name in names)
    ]
    return bool(hits) if not value.startswith("^") else len(hits) < len(facts.nics)


@each_host.fail(
    "E-ENV-02",
    title="{name} fits no interface there",
    meaning="NCCL ends with `no socket interface found`",
    fix="delete it from the cluster file: gangline sets the exact one for every host",
)
def _certain_nccl(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _unfit(facts, host, "NCCL_SOCKET_IFNAME", _nccl_fits, certain=True)


@each_host.warn(
    "E-ENV-02",
    title="{name} fits no interface there",
    meaning="NCCL would end with `no socket interface found`; gangline gives its ranks the right one",
    fix="delete the line: gangline sets the exact one for every host",
)
def _overridden_nccl(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _unfit(facts, host, "NCCL_SOCKET_IFNAME", _nccl_fits, certain=False)


def _gloo_fits(value: str, facts: HostFacts) -> bool:
    return facts.nic(value) is not None


@each_host.fail(
    "E-ENV-03",
    title="{name} names no interface there",
    meaning="gloo ends with `Unable to find address for`",
    fix="delete it from the cluster file: gangline sets the exact one for every host",
)
def _certain_gloo(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _unfit(facts, host, "GLOO_SOCKET_IFNAME", _gloo_fits, certain=True)


@each_host.warn(
    "E-ENV-03",
    title="{name} names no interface there",
    meaning="gloo would end with `Unable to find address for`; gangline gives its ranks the right one",
    fix="delete the line: gangline sets the exact one for every host",
)
def _overridden_gloo(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _unfit(facts, host, "GLOO_SOCKET_IFNAME", _gloo_fits, certain=False)


@whole_cluster.warn(
    "E-ENV-03",
    title="{name} is loopback",
    meaning="ranks of other hosts get the address 127.0.0.1 and cannot connect: some end, others hang",
    fix="delete the line: gangline sets the exact one for every host",
)
def _gloo_loopback(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    if len(cluster.hosts) < 2 or cluster.is_one_machine:
        return
    for facts, host in pairs(inventory, cluster):
        for row, value in _said(facts, host, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if value.lstrip("=") == "lo":
                yield Seen(hosts=(facts.host,), evidence=_words(row), words={"name": row.name})


@each_host.warn(
    "E-ENV-04",
    title="ranks or their meeting point are set by hand",
    meaning="scripts started there take that rank; gangline sets them for each rank it starts",
    fix="delete the lines: gangline sets them",
)
def _ranks(facts: HostFacts, host: Host) -> Iterator[str]:
    rows = _said(facts, host, *sorted(RANKS))
    if rows:
        yield ", ".join(_words(row) for row, _ in rows[:4])


@each_host.warn(
    "E-ENV-05",
    title="InfiniBand or RoCE is switched off",
    meaning="NCCL uses plain TCP although there is a faster way",
    fix="delete the line, unless it was done on purpose",
)
def _disabled(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, value in _said(facts, host, "NCCL_IB_DISABLE"):
        if value == "1" and facts.rdma.active:
            yield f"{_words(row)}; {facts.rdma.active[0].name} is active"


@each_host.warn(
    "E-ENV-06",
    title="a GID index is written down",
    meaning="it changes with addresses and firmware: NCCL then hangs or ends when it connects",
    fix="delete the line: NCCL finds it by itself",
)
def _pinned(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, _ in _said(facts, host, "NCCL_IB_GID_INDEX"):
        yield _words(row)


@each_host.warn(
    "E-ENV-07",
    title="CUDA_VISIBLE_DEVICES hides GPUs",
    meaning="ranks share the cards that are left",
    fix="delete the line, or set `slots` of this host to what it leaves",
)
def _hidden(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, value in _said(facts, host, "CUDA_VISIBLE_DEVICES"):
        visible = [] if value in {"", "-1", "none", "NoDevFiles"} else value.split(",")
        if len(visible) < len(facts.gpus) and len(visible) < host.slots:
            yield f"{_words(row)}; {len(visible)} of {len(facts.gpus)} GPUs, {host.slots} slots"

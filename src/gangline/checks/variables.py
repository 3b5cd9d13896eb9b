"""Do variables that somebody set once do harm, or nothing?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Evidence, Finding, Rule, Seen, apply, each, pairs
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


def check_variables(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Variables of hosts, their shells' files, and the cluster file."""
    return apply(RULES, inventory, cluster)


def _said(facts: HostFacts, host: Host, *names: str) -> list[tuple[Variable, str]]:
    """Variables of these names with their values, wherever they are set. Our own last word is in the cluster file."""
    ours = [Variable(name=name, value=value, source=CLUSTER_FILE) for name, value in host.env.items()]
    found = {(row.name, row.value, row.source): row for row in (*facts.variables, *ours) if row.name in names}
    return [(row, row.value or "") for row in found.values()]


def _words(row: Variable) -> str:
    value = "..." if row.value is None else row.value
    return f"{row.name}={value} in {row.source}"


def _dead(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    for row, _ in _said(facts, host, *DEAD):
        yield f"{_words(row)}; {DEAD[row.name]}", {"name": row.name}


def _nccl_absent(facts: HostFacts, host: Host, *, certain: bool) -> Iterator[Evidence]:
    """Whether NCCL would find no interface; certain: it is in the cluster file, which has the last word."""
    for row, value in _said(facts, host, "NCCL_SOCKET_IFNAME"):
        if facts.nics and value and (row.source == CLUSTER_FILE) == certain and not _matches(value, facts):
            yield f"{_words(row)}; it has {', '.join(nic.name for nic in facts.nics[:8])}", {"name": row.name}


def _matches(value: str, facts: HostFacts) -> bool:
    """NCCL's rules: a list of beginnings of names; = before it: whole names; ^: all but these."""
    exact = value.startswith(("=", "^="))
    names = [name for name in value.lstrip("^=").split(",") if name]
    hits = [
        nic.name
        for nic in facts.nics
        if any(nic.name == name or (not exact and nic.name.startswith(name)) for name in names)
    ]
    return bool(hits) if not value.startswith("^") else len(hits) < len(facts.nics)


def _certain_nccl(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _nccl_absent(facts, host, certain=True)


def _overridden_nccl(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _nccl_absent(facts, host, certain=False)


def _gloo_absent(facts: HostFacts, host: Host, *, certain: bool) -> Iterator[Evidence]:
    for row, value in _said(facts, host, "GLOO_SOCKET_IFNAME"):
        here = facts.nic(value) is not None
        if facts.nics and value and (row.source == CLUSTER_FILE) == certain and not here:
            yield f"{_words(row)}; it has {', '.join(nic.name for nic in facts.nics[:8])}", {"name": row.name}


def _certain_gloo(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _gloo_absent(facts, host, certain=True)


def _overridden_gloo(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    return _gloo_absent(facts, host, certain=False)


def _gloo_loopback(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    if len(cluster.hosts) < 2 or cluster.is_one_machine:
        return
    for facts, host in pairs(inventory, cluster):
        for row, value in _said(facts, host, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if value.lstrip("=") == "lo":
                yield Seen(hosts=(facts.host,), evidence=_words(row), words={"name": row.name})


def _ranks(facts: HostFacts, host: Host) -> Iterator[str]:
    rows = _said(facts, host, *sorted(RANKS))
    if rows:
        yield ", ".join(_words(row) for row, _ in rows[:4])


def _disabled(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, value in _said(facts, host, "NCCL_IB_DISABLE"):
        if value == "1" and facts.rdma.active:
            yield f"{_words(row)}; {facts.rdma.active[0].name} is active"


def _pinned(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, _ in _said(facts, host, "NCCL_IB_GID_INDEX"):
        yield _words(row)


def _hidden(facts: HostFacts, host: Host) -> Iterator[str]:
    for row, value in _said(facts, host, "CUDA_VISIBLE_DEVICES"):
        visible = [] if value in {"", "-1", "none", "NoDevFiles"} else value.split(",")
        if len(visible) < len(facts.gpus) and len(visible) < host.slots:
            yield f"{_words(row)}; {len(visible)} of {len(facts.gpus)} GPUs, {host.slots} slots"


RULES = (
    Rule(
        id="E-ENV-01",
        severity="warn",
        title="{name} does nothing",
        meaning="who set it expects another behaviour than there is; collectives wait as long as the job says",
        fix="delete the line",
        look=each(_dead),
    ),
    Rule(
        id="E-ENV-02",
        severity="fail",
        title="{name} fits no interface there",
        meaning="NCCL ends with `no socket interface found`",
        fix="delete it from the cluster file: gangline sets the exact one for every host",
        look=each(_certain_nccl),
    ),
    Rule(
        id="E-ENV-02",
        severity="warn",
        title="{name} fits no interface there",
        meaning="NCCL would end with `no socket interface found`; ranks that gangline starts are told the right one",
        fix="delete the line: gangline sets the exact one for every host",
        look=each(_overridden_nccl),
    ),
    Rule(
        id="E-ENV-03",
        severity="fail",
        title="{name} names no interface there",
        meaning="gloo ends with `Unable to find address for`",
        fix="delete it from the cluster file: gangline sets the exact one for every host",
        look=each(_certain_gloo),
    ),
    Rule(
        id="E-ENV-03",
        severity="warn",
        title="{name} names no interface there",
        meaning="gloo would end with `Unable to find address for`; ranks that gangline starts are told the right one",
        fix="delete the line: gangline sets the exact one for every host",
        look=each(_overridden_gloo),
    ),
    Rule(
        id="E-ENV-03",
        severity="warn",
        title="{name} is loopback",
        meaning="ranks of other hosts are told 127.0.0.1 and find nobody there: some end, others hang",
        fix="delete the line: gangline sets the exact one for every host",
        look=_gloo_loopback,
    ),
    Rule(
        id="E-ENV-04",
        severity="warn",
        title="ranks or their meeting point are set by hand",
        meaning="scripts that are started there believe to be that rank; gangline sets them for each rank it starts",
        fix="delete the lines: nobody has to type a rank",
        look=each(_ranks),
    ),
    Rule(
        id="E-ENV-05",
        severity="warn",
        title="InfiniBand or RoCE is switched off",
        meaning="NCCL uses plain TCP although there is a faster way",
        fix="delete the line, unless it was done on purpose",
        look=each(_disabled),
    ),
    Rule(
        id="E-ENV-06",
        severity="warn",
        title="a GID index is written down",
        meaning="it changes with addresses and firmware: NCCL then hangs or ends when it connects",
        fix="delete the line: NCCL finds it by itself",
        look=each(_pinned),
    ),
    Rule(
        id="E-ENV-07",
        severity="warn",
        title="CUDA_VISIBLE_DEVICES hides GPUs",
        meaning="ranks share the cards that are left",
        fix="delete the line, or set `slots` of this host to what it leaves",
        look=each(_hidden),
    ),
)

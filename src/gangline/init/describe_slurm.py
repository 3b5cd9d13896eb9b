"""`gangline init --slurm`: write cluster.yaml for a Slurm cluster, from what sinfo and sacctmgr say."""

from __future__ import annotations

import getpass
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.config.load import read_cluster_text
from gangline.errors import GanglineError, UsageError
from gangline.init.dependencies import InitConsole
from gangline.init.describe import InitQuestion, require_room, scalar, write
from gangline.inventory.partitions import SlurmPartition, as_time, partition_named, read_partitions
from gangline.runs.cluster import Cluster
from gangline.transport.slurm_commands import slurm
from gangline.units import listed

MOST_S = 24 * 3600.0
"""The time that is written where the site gives more: shorter jobs start sooner, and runs continue by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmDescribed:
    """What `init --slurm` found and wrote."""

    cluster: Cluster
    partition: SlurmPartition
    text: str
    path: Path | None
    """None: nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": None if self.path is None else str(self.path),
            "cluster": self.cluster.to_json(),
            "partition": {"name": self.partition.name, "limit": self.partition.limit, "has": self.partition.lines()},
        }


def init_slurm(
    asked: InitQuestion,
    *,
    partition: str | None,
    shared: Path,
    console: InitConsole,
    read: Callable[..., str] = slurm,
) -> SlurmDescribed:
    """Describe a Slurm cluster and write it down; raises UsageError, and what `slurm` does.

    partition: None: the site's default, or the only one. shared: a folder that login host and nodes share.
    """
    require_room(asked)
    console.progress("asking Slurm for its partitions")
    found = read_partitions(read)
    chosen = _chosen(found, partition)
    for each in found:
        for line in each.lines():
            console.report(f"{'*' if each == chosen else ' '} {each.name}: {line}; longest time {each.limit}")
    text = slurm_text(chosen, accounts=_accounts(read), name=asked.name or _cluster_name(read), shared=shared)
    cluster = read_cluster_text(text, asked.output, home=asked.home)
    path = None if asked.dry_run else write(asked, text, console=console)
    return SlurmDescribed(cluster=cluster, partition=chosen, text=text, path=path)


def _chosen(found: Sequence[SlurmPartition], name: str | None) -> SlurmPartition:
    """The partition that is named, or the default; of several without a default none is guessed."""
    if name is None and not any(each.is_default for each in found):
        if len(found) == 1:
            return found[0]
        raise UsageError(
            "this site has no default partition",
            seen=f"sinfo shows {listed([each.name for each in found]) or 'none'}",
            fix="gangline init --slurm --partition NAME",
        )
    return partition_named(found, name)


def _accounts(read: Callable[..., str]) -> list[str]:
    """The accounts that the user may charge; [] where the site keeps none, or does not tell."""
    try:
        said = read(
            "sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=account"
        )
    except (GanglineError, KeyError, OSError):
        return []
    return list(dict.fromkeys(filter(None, (line.strip() for line in said.splitlines()))))


def _cluster_name(read: Callable[..., str]) -> str:
    try:
        found = re.search(r"^ClusterName\s*=\s*([A-Za-z0-9][\w.-]*)", read("scontrol", "show", "config"), re.MULTILINE)
    except GanglineError:
        found = None
    return found[1][:63] if found else "slurm"


def slurm_text(partition: SlurmPartition, *, accounts: Sequence[str], name: str, shared: Path) -> str:
    """The file: what was found, and what the user may want to change, each with a word on it."""
    gpus = Counter(node.gpus[0] for node in partition.nodes if node.gpus)
    limit_s = partition.limit_s
    rows = [("partition", partition.name, "; ".join(partition.lines()))]
    if accounts:
        others = f"also yours: {listed(list(accounts[1:]))}" if len(accounts) > 1 else "what the time is charged to"
        rows.append(("account", accounts[0], others))
    rows.append(("nodes", "1", f"of one run; the partition has {len(partition.nodes)}"))
    if gpus:
        (kind, count), _ = gpus.most_common(1)[0]
        rows.append(("gpus_per_node", f"{kind}:{count}" if kind else str(count), "or fewer"))
    time = as_time(MOST_S) if limit_s is None or limit_s > MOST_S else partition.limit
    rows.append(("time", time, f"of one allocation, at most {partition.limit}; longer runs continue in the next one"))
    lines = ["# Written by gangline init --slurm. Every key: docs/cluster.md", f"name: {scalar(name)}", "slurm:"]
    lines += [f"  {key}: {scalar(value) if key != 'nodes' else value}  # {note}" for key, value, note in rows]
    lines += [
        f"  workdir: {scalar(str(shared / 'gangline'))}  # best a fast disk that all nodes share",
        f"shared: {scalar(str(shared))}  # seen by this login host and by all nodes",
    ]
    return "\n".join(lines) + "\n"

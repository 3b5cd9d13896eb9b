"""The resolved cluster: what `cluster.yaml` means, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from gangline.runs.files import read_json
from gangline.runs.job import build
from gangline.runs.layout import RunLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine, and how to reach it."""

    name: str
    workdir: str
    """Absolute folder on the host below which everything of gangline lies there (`RunLayout.root`)."""
    python: str
    """The Python on the host that has gangline[train] installed."""
    transport: Literal["local"] = "local"
    address: str = "127.0.0.1"
    """Where the other hosts reach this one."""
    interface: str | None = None
    """Network interface for the ranks' traffic; None: the system's choice."""
    slots: int = 1
    """Ranks that run here."""
    share: float | None = None
    """Speed of this host relative to the others; None: all slots of the cluster count the same."""
    slowdown: float = 1.0
    """Trials only: ranks here take this many times as long (simulated)."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run; the first host is the head."""

    name: str
    hosts: tuple[Host, ...]

    @property
    def head(self) -> Host:
        """The host with rank 0."""
        return self.hosts[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data for cluster.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Cluster:
        """The cluster that `to_json` wrote."""
        return build(Cluster, data)

    @staticmethod
    def of_attempt(layout: RunLayout, number: int) -> Cluster:
        """The hosts of one attempt; until it has been written down, those of the run. Raises FileNotFoundError."""
        path = layout.attempt(number) / "cluster.json"
        return Cluster.from_json(read_json(path if path.exists() else layout.cluster))

"""Facts of one host, and the inventory of all: plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gangline.runs.job import build

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it."""

    index: int
    name: str
    uuid: str
    memory_total_bytes: int
    memory_free_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What was read off one host."""

    host: str
    """The name the cluster gives it."""
    hostname: str
    """The name it gives itself."""
    num_cpus: int
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    workdir: str
    """The work folder with symbolic links resolved."""
    disk_free_bytes: int
    python: str
    packages: dict[str, str | None]
    """Version by distribution name; None where it is not installed."""
    gpus: tuple[Gpu, ...] = ()
    gpu_reason: str | None = None
    """Why `gpus` is empty."""

    @staticmethod
    def from_json(data: dict[str, Any]) -> HostFacts:
        """Facts from plain data; raises TypeError or ValueError for anything else."""
        return build(HostFacts, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailure:
    """A host whose facts could not be read."""

    host: str
    why: str
    unreachable: bool
    """True where the host does not answer; False where it answers but cannot say its facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What was read off every host, in the cluster's order."""

    gathered: str
    """When, in ISO format."""
    hosts: tuple[HostFacts, ...]
    failures: tuple[HostFailure, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain data for inventory.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Inventory:
        """The inventory that `to_json` wrote."""
        return build(Inventory, data)

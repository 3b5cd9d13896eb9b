"""The gang of one attempt: which rank runs where, with which share. Written by the controller, read by every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.runs.deal import split_whole
from gangline.runs.division import Division
from gangline.runs.rows import rows_left, rows_of
from gangline.runs.versions import load_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRank:
    """One process of the gang."""

    host: str
    share: int
    """Micro-batches of every full step that this rank does; the shares of all ranks sum to batch / micro_batch. All
    ranks of a pipeline, and under tp all of a host, do the same ones: each has the share of its pipeline or host."""
    slowdown: float = 1.0
    """Trials only: this rank sleeps before each micro-batch so that it takes `slowdown` times as long (simulated)."""
    device: int = 0
    """Index of this rank's GPU on its machine, where there is any."""
    peak_flops: float | None = None
    """Dense half-precision peak of the device in FLOP/s; None: unknown, and then there is no MFU."""
    foreseen_bytes: int | None = None
    """Of tensors on its GPU at the most, as the plan says; None: not known, or it has no GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang(Division):
    """All ranks of one attempt, by global rank; ranks of one host are adjacent."""

    run_id: str
    attempt: int
    ranks: tuple[GangRank, ...]
    resume_step: int | None = None
    """Optimizer step of the committed checkpoint to start from; None: from the beginning."""
    lacking: tuple[str, ...] = ()
    """Hosts that do not have that checkpoint: their ranks get the state from one whose host has it."""
    init_timeout_s: float = 60.0
    """How long a rank waits for the others to join."""
    collective_timeout_s: float = 1800.0
    """How long a rank waits in an exchange: others may load or save. Who hangs is found earlier, by the supervisor."""
    micro_batch: int | None = None
    """Samples of a micro-batch, where memory did not suffice for as many as the job says; None: as it says."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, head first."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    def num_ranks(self, host: str) -> int:
        """Ranks of one host."""
        return sum(rank.host == host for rank in self.ranks)

    @property
    def crews(self) -> tuple[int, ...]:
        """By rank: equal numbers for those that do the same micro-batches. A pipeline is one crew, under tp a host."""
        layers = self.half.layers
        if layers == "staged":
            return tuple(number for number, row in enumerate(self.rows) for _ in row)
        if layers == "sliced":
            return tuple(self.hosts.index(rank.host) for rank in self.ranks)
        return tuple(range(self.world_size))

    @property
    def rows(self) -> tuple[range, ...]:
        """Ranks of every pipeline."""
        return rows_of(self.stages, replicas=self.replicas) if self.replicas > 1 else (range(self.world_size),)

    def row_of(self, rank: int) -> range:
        """Ranks of the pipeline that this one is in."""
        return next(row for row in self.rows if rank in row)

    def on(
        self, hosts: Collection[str], *, attempt: int, resume_step: int | None, lacking: tuple[str, ...] = ()
    ) -> Gang:
        """The gang of a later attempt on some of these hosts, who share the others' work in proportion to their own.

        In a pipeline that are layers: whoever is left takes part in as many micro-batches as before. Of several
        pipelines those that are broken become parts of others: see `rows_left`.
        """
        left = [number for number, rank in enumerate(self.ranks) if rank.host in hosts]
        stages, replicas = self.stages, 1
        if self.half.layers == "staged":
            rows = rows_left(stages, [rank.share for rank in self.ranks], left, replicas=self.replicas)
            left, own, stages, replicas = list(rows.ranks), rows.shares, rows.stages, rows.replicas
        else:
            own = self._divided_by_crew(left)
        ranks = [self.ranks[number] for number in left]
        same = len(ranks) == len(self.ranks)  # else what a rank needs may be other than was foreseen
        dealt = tuple(
            dataclasses.replace(rank, share=share, foreseen_bytes=rank.foreseen_bytes if same else None)
            for rank, share in zip(ranks, own, strict=True)
        )
        return dataclasses.replace(
            self,
            attempt=attempt,
            ranks=dealt,
            stages=stages,
            replicas=replicas,
            eager=self.eager and same,  # with more layers each there is less room for micro-batches
            resume_step=resume_step,
            lacking=lacking,
        )

    def _divided_by_crew(self, left: Sequence[int]) -> tuple[int, ...]:
        """Shares of the ranks that are left; crews are left whole."""
        crews = self.crews
        shares = {crew: rank.share for crew, rank in zip(crews, self.ranks, strict=True)}
        own = {crews[number] for number in left}
        dealt = _divided(list(shares.values()), [place for place, crew in enumerate(shares) if crew in own])
        by_crew = dict(zip([crew for crew in shares if crew in own], dealt, strict=True))
        return tuple(by_crew[crews[number]] for number in left)

    def in_smaller(self, micro_batch: int, *, before: int) -> Gang:
        """The same work in smaller micro-batches, of which every rank does more. before: their size, a multiple."""
        times = before // micro_batch
        ranks = [dataclasses.replace(rank, share=rank.share * times, foreseen_bytes=None) for rank in self.ranks]
        return dataclasses.replace(self, ranks=tuple(ranks), micro_batch=micro_batch, eager=False)

    def save(self, path: Path) -> None:
        """Write gang.json."""
        write_record(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain data for gang.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def load(path: Path) -> Gang:
        """Read gang.json."""
        return load_record(path, Gang)


def _divided(parts: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
    """What all ranks had, among those that are left, in proportion to their own: nobody has less than before."""
    own = [parts[number] for number in left]
    return split_whole(sum(parts), own if any(own) else [1] * len(own))

"""How fast a seat computes: as it was measured, else as the catalogue lets expect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.planning.architecture import Architecture
from gangline.planning.speed import Card, CardKind, ComputeModel, uncalibrated
from gangline.planning.training import Training
from gangline.planning.world import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds that are known for one model."""

    architecture: Architecture
    config: dict[str, Any]
    home: Path

    def of(self, seat: Seat, training: Training) -> ComputeModel | None:
        """Of a seat; None where nobody measured it and the catalogue does not have it."""
        if seat.spec is None:
            return None
        card = Card(peak_flops=seat.spec.tflops * 1e12, bytes_per_s=seat.spec.bandwidth_gb_s * 1e9, kind=_kind(seat))
        return uncalibrated(card, self.architecture, training)


def _kind(seat: Seat) -> CardKind:
    assert seat.spec is not None
    if seat.spec.laptop:
        return "laptop"
    return "consumer" if seat.spec.name.startswith(("GeForce", "TITAN")) else "datacenter"

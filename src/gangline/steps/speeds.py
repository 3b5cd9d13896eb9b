"""How fast a seat computes: as it was measured, else as the catalogue lets expect."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from gangline.inventory.profiles import find_profile, load_profiles
from gangline.planning.architecture import Architecture
from gangline.planning.calibrate import Profile, ProfileKey, architecture_digest, method_words
from gangline.planning.flops import flops_per_token
from gangline.planning.speed import ComputeModel, uncalibrated
from gangline.planning.training import GANGLINE, Training
from gangline.planning.world import Seat

MAKER = "NVIDIA "
"""What NVML says before the names that the catalogue has."""
DERIVED_SPREAD = 0.15
"""What is added where recomputation was not measured but reckoned from FLOPs."""


@dataclass(slots=True, kw_only=True)
class Speeds:
    """The speeds that are known for one model; each is looked up once."""

    architecture: Architecture
    home: Path
    _profiles: list[Profile] | None = None
    _known: dict[object, ComputeModel | None] = field(default_factory=dict)

    def of(self, seat: Seat, training: Training) -> ComputeModel | None:
        """Of a seat; None where nobody measured it and the catalogue does not have it."""
        # neither the size of micro-batches nor their number changes what a token takes
        training = dataclasses.replace(training, micro_batch=1, accumulation=1)
        key = (seat.host, seat.gpu, seat.spec, seat.power_limit_w, training)
        if key not in self._known:
            self._known[key] = self._measured(seat, training) or self._expected(seat, training)
        return self._known[key]

    def _measured(self, seat: Seat, training: Training) -> ComputeModel | None:
        """From a profile of the very method, or of the one that differs in recomputation only."""
        if (profile := self._profile(seat, training)) is not None:
            return profile.corrected
        other = dataclasses.replace(training, checkpointing=not training.checkpointing)
        if (profile := self._profile(seat, other)) is None:
            return None
        length = training.sequence_length
        totals = [flops_per_token(self.architecture, each, length=length).total for each in (training, other)]
        model = profile.corrected.scaled(totals[0] / totals[1])
        # what a run of it takes is no word on the measurement
        return dataclasses.replace(model, spread=model.spread + DERIVED_SPREAD, profile=None)

    def _profile(self, seat: Seat, training: Training) -> Profile | None:
        """Of our own trainer only: another's kernels are as fast as they are."""
        if not training.stack.name.startswith(GANGLINE.name):
            return None
        if self._profiles is None:
            self._profiles = load_profiles(self.home)
        wanted = ProfileKey(
            gpu="cpu" if seat.gpu is None else seat.gpu if seat.gpu.startswith(MAKER) else MAKER + seat.gpu,
            driver="",
            torch="",
            kernels="eager" if training.stack.attention == "eager" else "sdpa",
            method=method_words(training),
            dtype=training.compute,
            architecture=architecture_digest(self.architecture),
        )
        return find_profile(self._profiles, wanted, host=seat.host)

    def _expected(self, seat: Seat, training: Training) -> ComputeModel | None:
        if seat.spec is None:
            return None
        return uncalibrated(seat.spec, self.architecture, training, power_limit_w=seat.power_limit_w)

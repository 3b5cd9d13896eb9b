"""How fast a seat computes: as it was measured, else as the catalogue lets expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gangline.catalog.efficiency import default_efficiency
from gangline.catalog.gpus import GpuSpec
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.profiles import find_profile, load_profiles
from gangline.planning.architecture import Architecture
from gangline.planning.calibrate import Profile, ProfileKey, architecture_digest, method_words
from gangline.planning.flops import flops_per_token
from gangline.planning.speed import WIDE_NUMBERS, ComputeModel, copies_s, uncalibrated
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

    def profile_of(self, seat: Seat, training: Training) -> Profile | None:
        """The measurement that the speed of a seat rests on; None where nobody measured it."""
        plain = dataclasses.replace(training, offloading=False)
        other = dataclasses.replace(plain, checkpointing=not plain.checkpointing)
        return self._profile(seat, training) or self._profile(seat, plain) or self._profile(seat, other)

    def dated(self, seats: Sequence[Seat], training: Training, inventory: Inventory) -> list[str]:
        """A sentence for every measurement that was made under another driver or torch than its host has now.

        The measurement is used all the same: it is nearer to the truth than a data sheet.
        """
        found: dict[str, None] = {}
        for seat in seats:
            facts, profile = inventory.of(seat.host), self.profile_of(seat, training)
            changes = [] if facts is None or profile is None else _changes(profile.key, facts, seat.device)
            if profile is not None and changes:
                whose = "" if profile.host == seat.host else f" on {profile.host}"
                text = f"{seat.host}: speed measured {profile.measured[:10]}{whose} with {' and '.join(changes)} now"
                found[f"{text}; gangline bench compute JOB measures it anew"] = None
        return list(found)

    def _measured(self, seat: Seat, training: Training) -> ComputeModel | None:
        """From a profile of the very method, or of one that differs in recomputation or in where activations lie."""
        if (profile := self._profile(seat, training)) is not None:
            return profile.corrected
        if training.offloading:
            plain = self._measured(seat, dataclasses.replace(training, offloading=False))
            copied_s = 0.0 if seat.gpu is None else copies_s(self.architecture, training)
            if plain is None:
                return None
            return dataclasses.replace(plain, per_token_s=plain.per_token_s + copied_s, profile=None)
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
        model = uncalibrated(seat.spec, self.architecture, training, power_limit_w=seat.power_limit_w)
        factor = _without_tensor_cores(seat.spec, self.architecture, training)
        slopes = ("per_token_s", "per_token2_s", "head_per_token_s")
        return dataclasses.replace(model, **{name: factor * getattr(model, name) for name in slopes})


def _without_tensor_cores(spec: GpuSpec, architecture: Architecture, training: Training) -> float:
    """Time of products over what `uncalibrated` says, which takes it that 16-bit numbers are the fast ones.

    A card without tensor cores has one rate, that of fp32; in fp16 the GTX 16 series reaches a part of it. What is not
    products takes as long as it does at full rate.
    """
    if training.compute == "fp32":
        return 1.0 if spec.tensor_cores else 1 / WIDE_NUMBERS
    if training.compute != "fp16" or spec.fp16_share == 1.0:
        return 1.0
    _, reached, _ = default_efficiency(spec, method=training.method, num_parameters=architecture.num_parameters)
    return 1 + reached * (1 / spec.fp16_share - 1)


def _changes(key: ProfileKey, facts: HostFacts, device: int) -> list[str]:
    """Which of driver and torch the host has in another version than the measurement; what is not known, is not."""
    driver = facts.gpus[device].driver if device < len(facts.gpus) else ""
    pairs = (("driver", key.driver, driver), ("torch", key.torch, facts.packages.get("torch") or ""))
    known = [(what, then, now) for what, then, now in pairs if not {then, now} & {"", "?"}]
    return [f"{what} {then}, {now}" for what, then, now in known if not _same_version(then, now)]


def _same_version(one: str, other: str) -> bool:
    """Whether two versions are one; 2.13.0 says less than 2.13.0+cu128, and nothing else."""
    (base, _, build), (other_base, _, other_build) = one.partition("+"), other.partition("+")
    return base == other_base and (build == other_build or not build or not other_build)

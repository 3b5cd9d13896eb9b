"""Whether all replicas are still the same: digests of the trained weights, 8 bytes of each rank, every 50 steps.

What holds under ddp. All ranks begin with the same bits, and get the same gradients to the bit: in a ring every value
is summed up by one rank and sent to the others as it is (all-reduce of gloo and of NCCL), on whatever machines. But
every rank computes its update itself. Machines of one kind round alike, so their replicas stay equal to the bit, and a
digest that differs is damage: of memory, of a processor. Machines of different kinds round differently, by about a unit
in the last place per step, and a digest would accuse honest ones. (What they differ by does not grow by itself, for
gradients are common to all.) So

- bits are compared among ranks of one kind: same device or processor, instructions, threads, torch and C library. And
  only where they began the attempt with the same bits, of weights and optimizer: a host reads what it wrote itself, and
  may have got it from a machine of another kind.
- where digests differ between kinds, values are compared: sums of blocks of weights. Rounding moves such a sum like a
  random walk; what moves it by 64 times as much is none. It finds flips of sign, exponent and high bits, not those
  whose effect is as small as that of rounding, which nobody could tell from it.

Under local-sgd every rank applies the very same bits at the end of a round (strategy/outer.py), whatever its kind:
there bits are compared among all.

Under 8-bit AdamW a rounding that differs may move a moment to the next of its 256 values, and so a weight by far more
than a unit in the last place; under Lion it may change a sign, and Muon rounds to 16 bits within an update. There bits
are compared among ranks of one kind, and of others it is only seen whether all have numbers in the same places.

Weights that are in parts (fsdp under full fine-tuning) are nobody's replica, and not compared.

What is not seen: a wrong gradient, which is summed and moves all replicas alike (worker/spikes.py may), and damage of
weights that are not trained. A digest is an exclusive or, so two flips of the same bit in one tensor cancel.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gangline.errors import BadState
from gangline.optimizers import EIGHT_BITS, OPTIMIZERS
from gangline.worker.model import trainable
from gangline.worker.optimizer import state_tensors
from gangline.worker.run_io import RunIO
from gangline.worker.session import Session

EVERY = 50
"""Optimizer steps between two looks."""
BLOCK = 4096
"""Weights in one sum."""
TOLERANCE = 64.0
"""Times the distance that rounding is likely to have moved a block by."""
_ODD = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Ranks whose weights are not those of the others."""

    ranks: tuple[int, ...]
    sure: bool
    """False: one or some of them, and nobody can know which."""


class Replicas:
    """Compares the weights of all ranks of one attempt.

    exact: every rank applies the same bits, so that kinds of machines do not matter.
    """

    def __init__(self, session: Session, outlets: RunIO, *, exact: bool = False) -> None:
        self._session = session
        self._world = session.world
        self._out = outlets
        self._exact = exact
        self._parameters = [parameter.detach() for parameter in trainable(session.model).values()]
        self._alike: list[int] = []
        """By rank: equal numbers for ranks whose bits are compared."""
        self._compared: int | None = None
        """The step whose weights were compared last, and found the same; None: not begun, so nothing is compared."""

    def begin(self, *, step: int) -> None:
        """Find out who can be compared with whom, and compare what the attempt begins with; collective."""
        if self._world.size == 1 or self._session.strategy.shard_group is not None:
            return
        mark = 0
        if not self._exact:
            start = digest(state_tensors(self._session.model, self._session.optimizer).values())
            kind = f"{kind_of(self._world.device)}{self._library()}"
            mark = int.from_bytes(hashlib.sha256(f"{kind} {start}".encode()).digest()[:8], "big")
        self._alike = self._gather(mark)
        self._compare(step)

    def look(self, *, step: int) -> None:
        """Compare if it is time to, at the end of a step; collective. Raises BadState."""
        if self._compared is not None and step // EVERY > self._compared // EVERY:
            self._out.enter("exchange", step=step)
            self._compare(step)

    def verify_replicas(self, *, step: int) -> None:
        """Compare what is going to be saved, unless that was done; collective. Raises BadState."""
        if self._compared is not None and step != self._compared:
            self._compare(step)

    def _compare(self, step: int) -> None:
        digests = self._gather(digest(self._parameters))
        if len(set(digests)) > 1:
            suspicion = self._judge(digests, step)
            if suspicion is not None:
                self._accuse(suspicion, step)
        self._compared = step

    def _judge(self, digests: Sequence[int], step: int) -> Suspicion | None:
        """Bits among alike ranks, values among all; every rank does the same arithmetic on the same numbers."""
        odd, tied = outvoted(digests, self._alike)
        far = self._far(step)
        named = set(odd)
        if tied:
            told = tied & set(far.ranks) if far is not None and far.sure else set()
            named |= told or tied
            return Suspicion(ranks=tuple(sorted(named)), sure=bool(told))
        if named:
            return Suspicion(ranks=tuple(sorted(named | set(far.ranks if far and far.sure else ()))), sure=True)
        return far

    @property
    def _is_smooth(self) -> bool:
        return OPTIMIZERS[self._session.job.optimizer.kind].smooth

    def _library(self) -> str:
        """What else decides how an update rounds."""
        return (
            f"; bitsandbytes {importlib.metadata.version('bitsandbytes')}"
            if self._session.job.optimizer.kind in EIGHT_BITS
            else ""
        )

    def _far(self, step: int) -> Suspicion | None:
        own = sketch(self._parameters)
        sketches = [torch.empty_like(own) for _ in range(self._world.size)]
        dist.all_gather(sketches, own)
        return outliers(torch.stack(sketches), num_steps=step if self._is_smooth else None)

    def _accuse(self, suspicion: Suspicion, step: int) -> None:
        ranks, gang = suspicion.ranks, self._world.gang
        places = [f"rank {rank} on {gang.ranks[rank].host}" for rank in ranks]
        listed = " and ".join([", ".join(places[:-1]), places[-1]] if len(places) > 1 else places)
        what = (
            f"the weights of {listed} are not those of the other ranks"
            if suspicion.sure
            else f"the weights of {listed} differ, and nobody can know whose are right"
        )
        hosts = list(dict.fromkeys(gang.ranks[rank].host for rank in ranks))
        before = "this is what they began with" if self._compared is None else f"at step {self._compared} they were"
        self._out.event("replicas-differ", step=step, ranks=list(ranks), hosts=hosts, sure=suspicion.sure, what=what)
        raise BadState(
            f"{what}, at step {step}",
            seen=f"expected replicas that are the same, and {before}; all ranks get the same gradients, and rounding "
            "explains no such difference",
            fix=f"a bit that flipped in memory or a processor of {' or '.join(hosts)} does this: test its memory "
            "(memtest86+; of a GPU, nvidia-smi -q -d ECC), or go on without it, from the last checkpoint",
        )

    def _gather(self, value: int) -> list[int]:
        """64 bits of every rank, by rank."""
        row = torch.zeros(self._world.size, dtype=torch.int64)
        row[self._world.rank] = value - (1 << 64) if value >> 63 else value
        dist.all_reduce(row)
        found: list[int] = row.tolist()
        return found


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits that change with any single bit of these tensors, and with their order."""
    found = [torch.hash_tensor(tensor.detach()).view(torch.int64) for tensor in tensors]
    value = 0
    for each in torch.stack([one.to(found[0].device, non_blocking=True) for one in found]).tolist():
        value = (value * _ODD + each) & _BITS
    return value


def kind_of(device: torch.device) -> str:
    """All that decides how this rank rounds when it updates weights; of more than that, rather than of less.

    The C library computes the cosine of the learning rate, threads decide where vectors are cut.
    """
    words = [torch.__version__, platform.machine(), _processor(), " ".join(platform.libc_ver())]
    words += [torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        words += [card.name, f"{card.major}.{card.minor}", str(torch.version.cuda or torch.version.hip)]
    return "; ".join(words)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    rows = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in rows if name.strip() in {"model name", "CPU part"}), "")


def outvoted(digests: Sequence[int], alike: Sequence[int]) -> tuple[set[int], set[int]]:
    """Ranks that differ from most of those that are like them; and ranks of which no majority is right.

    alike: by rank, equal numbers for ranks that are like each other.
    """
    odd: set[int] = set()
    tied: set[int] = set()
    for number in set(alike):
        ranks = [rank for rank, each in enumerate(alike) if each == number]
        (common, count), *others = collections.Counter(digests[rank] for rank in ranks).most_common()
        if 2 * count > len(ranks):
            odd |= {rank for rank in ranks if digests[rank] != common}
        elif others:
            tied |= set(ranks)
    return odd, tied


def sketch(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of every block of 4096 weights its sum, and what one rounding of each is likely to move that by.

    [2, blocks], fp64 in RAM: a two-thousandth of the bytes of fp32 weights.
    """
    rows = []
    for parameter in parameters:
        flat, eps = parameter.detach().reshape(-1), torch.finfo(parameter.dtype).eps
        whole = len(flat) // BLOCK * BLOCK
        for part in (flat[:whole].view(-1, BLOCK), flat[whole:][None]):
            sums = part.sum(dim=1, dtype=torch.float64)
            rows.append(torch.stack([sums, eps * torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)]))
    return torch.cat(rows, dim=1).cpu()


def outliers(sketches: torch.Tensor, *, num_steps: int | None) -> Suspicion | None:
    """Ranks some of whose blocks are further from the middle of all than rounding takes them in so many steps.

    num_steps: None where rounding may take them anywhere, so that only what is no number tells a rank from others.
    sketches: [ranks, 2, blocks]. Of an even number of ranks the middle is between two: then of two both are far.
    """
    sums, roundings = sketches[:, 0], sketches[:, 1]
    finite = sums.isfinite()
    broken = _numbers_of((~finite & finite.any(dim=0)).any(dim=1))
    if broken:
        return Suspicion(ranks=broken, sure=True)
    if num_steps is None:
        return None
    known = finite.all(dim=0)
    sums, roundings = sums[:, known], roundings[:, known]
    limit = TOLERANCE * math.sqrt(num_steps + 1) * _middle(roundings)
    far = _numbers_of(((sums - _middle(sums)).abs() > limit).any(dim=1))
    return Suspicion(ranks=far, sure=2 * len(far) < len(sums)) if far else None


def _numbers_of(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def _middle(table: torch.Tensor) -> torch.Tensor:
    """Median over ranks; of an even number the mean of the two in the middle."""
    ordered = table.sort(dim=0).values
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

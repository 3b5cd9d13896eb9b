"""What GPUs can do: by the names that NVML reports, or by what people type.

Rates are dense fp16/bf16 with fp32 accumulation, no sparsity. GeForce cards run this at half the rate that data sheets
call "tensor", which accumulate in fp16. The figures stand with their sources.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.plugins import Table, shown_type

_FILE = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
"""The GPUs: figures of their makers, measurements, and the source of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuArchitecture:
    """What one kind of chip can do."""

    capability: str
    """CUDA compute capability."""
    flop_per_sm_clock: int
    """16-bit matrix FLOP (fp32 accumulation, no sparsity) of one SM in one clock; a multiply-add is two."""
    bf16: bool = True
    """Whether bfloat16 runs at that rate. Older chips emulate it, several times slower."""
    tensor_cores: bool = True
    """Without them fp32 runs at that rate, too."""
    fp16_share: float = 1.0
    """Part of that rate which products in fp16 reach."""


ARCHITECTURES: dict[str, GpuArchitecture] = {
    name: GpuArchitecture(**row) for name, row in _FILE["architectures"].items()
}
SOURCES: dict[str, str] = _FILE["sources"]
"""Short names of sources -> their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One line of gpus.json, which explains the columns."""

    name: str
    architecture: str
    num_sms: int | None
    boost_mhz: float | None
    memory_gb: float
    visible_mib: int | None
    bandwidth_gb_s: float
    power_w: float
    stated_tflops: float | None
    measured_tflops: float | None
    source: str

    @property
    def computed_tflops(self) -> float | None:
        """SMs x clock x FLOP per SM and clock; None where SMs or clock are not known."""
        if self.num_sms is None or self.boost_mhz is None:
            return None
        return self.num_sms * self.boost_mhz * ARCHITECTURES[self.architecture].flop_per_sm_clock / 1e6


ROWS: tuple[GpuRow, ...] = tuple(GpuRow(**dict(zip(_FILE["columns"], row, strict=True))) for row in _FILE["rows"])
"""The table, in its order."""


# GPU names taken apart: what people type, and what NVML says, as sets of words that can be compared.


_MAKERS = frozenset({"nvidia", "geforce", "rtx", "gtx", "tesla", "quadro"})
_NOISE = _MAKERS | {"gpu", "graphics", "card", "design", "with", "generation", "edition", "blackwell"}
"""Words that tell no two cards of the table apart."""
_SAME = {"mobile": "laptop", "notebook": "laptop", "s": "super", "m": "laptop", "ws": "workstation", "spark": "gb10"}
_WEAK = frozenset({"laptop", "maxq", "ti", "super", "sxm", "pcie", "nvl", "pro", "ada", "sff", "workstation", "server"})
"""Words that say something of a card, but not which one it is."""


@functools.lru_cache(maxsize=1024)
def words(text: str) -> frozenset[str]:
    """The words that identify a card: "GeForce RTX 4070 Ti SUPER", "rtx4070tisuper" -> 4070, ti, super."""
    plain = re.sub(r"max[-_ ]?q", " maxq ", text.lower())
    plain = re.sub(r"[^a-z0-9]+", " ", plain)
    plain = re.sub(rf"\b({'|'.join(_MAKERS)})(?=[a-z]*\d)", r"\1 ", plain)
    plain = re.sub(r"\b(\d{4})(?=[a-z])", r"\1 ", plain)
    plain = re.sub(r"\b(ti|super)(?=(super|laptop|mobile)\b)", r"\1 ", plain)
    plain = re.sub(r"\b(\d+) ?(?:gb?|gib)\b", r"\1gb", plain)
    plain = re.sub(r"\bsxm\d?\b", "sxm", plain)
    plain = plain.replace("dgx spark", "spark")
    return frozenset(_SAME.get(word, word) for word in plain.split()) - _NOISE


def is_memory(word: str) -> bool:
    """Whether a word is a size, such as "80gb"."""
    return re.fullmatch(r"\d+gb", word) is not None


def naming(wanted: frozenset[str]) -> frozenset[str]:
    """The words among them that say which card it is: "4070", not "laptop" or "80gb"."""
    return frozenset(word for word in wanted if word not in _WEAK and not is_memory(word))


_VISIBLE_SHARE = 0.98
"""Of the memory as sold, where nobody published what nvidia-smi shows. Seen: 0.99 to 1.00 without ECC, and 0.94 with
ECC on GDDR, which holds for server cards only; these are all known."""
_ALIKE = 0.65
"""From which similarity on a name is worth a suggestion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One model of GPU."""

    name: str
    """As NVML reports it, without the leading "NVIDIA "."""
    tflops: float
    """Dense 16-bit peak with fp32 accumulation, TFLOP/s. Of a laptop GPU at the highest power it is sold with."""
    bf16: bool
    """Whether bfloat16 runs at that rate; if not, only fp16 does (and on GTX 16 neither: see `fp16_share`)."""
    tensor_cores: bool
    """Without them fp32 runs at that rate, too."""
    fp16_share: float
    """Part of that rate which products in fp16 reach: 1 but on GTX 16."""
    memory_gb: float
    """As sold: GiB on GDDR cards, anything near it on others. Not what can be used."""
    visible_bytes: int | None
    """The total that NVML reports with ECC as it is by default; None where no output was found."""
    bandwidth_gb_s: float
    """Of its memory, GB/s."""
    compute_capability: str
    power_w: float
    """Board power; of a laptop GPU the highest TGP without Dynamic Boost."""
    laptop: bool
    measured_tflops: float | None
    """Best matmul that somebody measured on one, TFLOP/s."""
    source: str
    """Key of `SOURCES`."""

    @property
    def total_bytes(self) -> int:
        """What NVML reports as total, or 98 % of what was sold where that is not known."""
        return self.visible_bytes or round(self.memory_gb * 2**30 * _VISIBLE_SHARE)


def _spec(row: GpuRow) -> GpuSpec:
    architecture = ARCHITECTURES[row.architecture]
    tflops = row.stated_tflops or row.computed_tflops
    assert tflops is not None, f"{row.name}: neither a rate nor SMs and clock"
    return GpuSpec(
        name=row.name,
        tflops=round(tflops, 1),
        bf16=architecture.bf16,
        tensor_cores=architecture.tensor_cores,
        fp16_share=architecture.fp16_share,
        memory_gb=row.memory_gb,
        visible_bytes=row.visible_mib * 2**20 if row.visible_mib else None,
        bandwidth_gb_s=row.bandwidth_gb_s,
        compute_capability=architecture.capability,
        power_w=row.power_w,
        laptop=row.name.endswith((" Laptop GPU", " with Max-Q Design")),
        measured_tflops=row.measured_tflops,
        source=row.source,
    )


def _read_rows(_name: str, found: Any) -> tuple[GpuSpec, ...]:
    """The GPUs of a plug-in, which are a sequence of `GpuRow`."""
    rows = tuple(found)
    strange = [row for row in rows if not isinstance(row, GpuRow)]
    if not rows or strange:
        seen = shown_type((strange or [found])[0])
        raise TypeError(f"expected a sequence of gangline.catalog.gpu_specs.GpuRow, found {seen}")
    for row in rows:
        if row.architecture not in ARCHITECTURES:
            raise ValueError(f"{row.name}: no architecture {row.architecture!r}; known: {', '.join(ARCHITECTURES)}")
        if row.stated_tflops is None and row.computed_tflops is None:
            raise ValueError(f"{row.name}: neither a rate nor the number of SMs and their clock")
    return tuple(_spec(row) for row in rows)


GPUS: tuple[GpuSpec, ...] = tuple(_spec(row) for row in ROWS)
"""All of them. Cards of two memory sizes that NVML gives one name are two entries, the smaller or commoner first."""

GPU_TABLES: Table[tuple[GpuSpec, ...]] = Table("gangline.gpus", {}, read=_read_rows)
"""GPUs of plug-ins; their packages are imported once a name is looked for that `GPUS` does not have literally."""


def all_gpus() -> tuple[GpuSpec, ...]:
    """All of them, and those of plug-ins. A plug-in that cannot be used is passed over; `gangline plugins` names it."""
    more, _ = GPU_TABLES.load_all()
    return (*GPUS, *(gpu for rows in more.values() for gpu in rows))


def find_gpu(text: str, *, total_bytes: int | None = None) -> GpuSpec | None:
    """The GPU that NVML calls `text`, or that somebody means by it: "rtx4090", "4070 laptop", "a100-80gb", "h100".

    A short name means the desktop card, not the laptop's; of server cards the commonest: `a100` and `h100` are the SXM
    ones with 80 GB. None where nothing fits: see `suggest_gpus`.

    total_bytes: the memory that NVML reports, to tell apart cards of one name (a 3080 with 10 or 12 GB).
    """
    found = _named(GPUS, text) or _named(all_gpus(), text) or _closest(words(text))
    if not found:
        return None
    if total_bytes is None:
        return found[0]
    of_that_name = [gpu for gpu in found if gpu.name == found[0].name]
    return min(of_that_name, key=lambda gpu: abs(gpu.total_bytes - total_bytes))


def _named(gpus: Sequence[GpuSpec], text: str) -> list[GpuSpec]:
    return [gpu for gpu in gpus if gpu.name == _bare(text)]


def _bare(name: str) -> str:
    return re.sub(r"^NVIDIA ", "", name.strip())


def _closest(wanted: frozenset[str]) -> list[GpuSpec]:
    """Cards with all the words, those with the fewest further words first; the table's order decides between equals."""
    if not naming(wanted):
        return []
    fitting = [gpu for gpu in all_gpus() if wanted <= words(gpu.name) | _may_add(gpu)]
    return sorted(fitting, key=lambda gpu: sum(not is_memory(word) for word in words(gpu.name) - wanted))


def _may_add(gpu: GpuSpec) -> frozenset[str]:
    """Words that people add and NVML does not say."""
    also = {f"{gpu.memory_gb:g}gb"}
    if gpu.laptop:
        also.add("laptop")
    if gpu.name in {"H100 80GB HBM3", "H200", "H800", "B200"}:
        also.add("sxm")
    return frozenset(also)


def suggest_gpus(text: str, *, at_most: int = 5) -> list[str]:
    """Names of the table that look like `text`, the nearest first, for an error message."""
    wanted = words(text)
    likenesses = {name: _likeness(wanted, words(name)) for name in dict.fromkeys(gpu.name for gpu in all_gpus())}
    near = [name for name, (shared, alike, _) in likenesses.items() if shared or alike >= _ALIKE]
    return sorted(near, key=likenesses.__getitem__, reverse=True)[:at_most]


def _likeness(wanted: frozenset[str], theirs: frozenset[str]) -> tuple[int, float, float]:
    """How many words that name a card are the same, how alike such words are, how alike all words are."""
    return len(naming(wanted) & naming(theirs)), _ratio(naming(wanted), naming(theirs)), _ratio(wanted, theirs)


def _ratio(some: frozenset[str], others: frozenset[str]) -> float:
    return difflib.SequenceMatcher(None, " ".join(sorted(some)), " ".join(sorted(others))).ratio()


def peak_flops(name: str) -> float | None:
    """Dense fp16/bf16 peak of the GPU that NVML calls `name`, in FLOP/s; None where it is not known.

    None for laptop GPUs too: what theirs is depends on the power that the laptop gives them, and a share of a peak that
    this machine cannot reach would say nothing.
    """
    found = _named(GPUS, name) or _named(all_gpus(), name)
    return found[0].tflops * 1e12 if found and not found[0].laptop else None

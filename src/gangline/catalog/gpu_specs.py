"""What GPUs can do: by the names that NVML reports, or by what people type.

Rates are dense fp16/bf16 with fp32 accumulation, no sparsity. GeForce cards run this at half the rate that data sheets
call "tensor", which accumulate in fp16. The figures stand with their sources.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.catalog.cuda import needed_cuda
from gangline.plugins import Table, shown_type

_FILES = [
    json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("gpus.json", "gpus_amd.json", "gpus_intel.json", "gpus_apple.json")
]
"""The GPUs: figures of their makers, measurements, and the source of each row; a file for each maker."""
_NAMES = json.loads(Path(__file__).with_name("gpu_names.json").read_text(encoding="utf-8"))
"""Words for cards that are not in their names, words for several cards, and accelerators that are none of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuArchitecture:
    """What one kind of chip can do."""

    vendor: str = "NVIDIA"
    capability: str = ""
    """CUDA compute capability; "" of other makers."""
    flop_per_sm_clock: int
    """16-bit matrix FLOP (fp32 accumulation, no sparsity) of one SM (AMD: compute unit, Intel: Xe-core, Apple: GPU
    core) in one clock; a multiply-add is two.
    """
    bf16: bool = True
    """Whether bfloat16 runs at that rate. Older chips emulate it, several times slower."""
    tensor_cores: bool = True
    """Whether 16-bit products are faster than fp32's, which else run at that rate, too."""
    fp16_share: float = 1.0
    """Part of that rate which products in fp16 reach."""
    system_gib: float | None = None
    """Its memory is the computer's, and the system holds so much of it; None: the card has memory of its own."""
    gpu_share: float = 1.0
    """Of the computer's memory: the part that the system lets the GPU have."""
    gpu_share_below_36_gb: float | None = None
    """The same of computers with less than 36 GB, where it differs."""


ARCHITECTURES: dict[str, GpuArchitecture] = {
    name: GpuArchitecture(**row) for file in _FILES for name, row in file["architectures"].items()
}
SOURCES: dict[str, str] = {name: text for file in _FILES for name, text in file["sources"].items()}
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
    note: str = ""
    devices: int = 1

    @property
    def computed_tflops(self) -> float | None:
        """SMs x clock x FLOP per SM and clock; None where SMs or clock are not known."""
        if self.num_sms is None or self.boost_mhz is None:
            return None
        return self.num_sms * self.boost_mhz * ARCHITECTURES[self.architecture].flop_per_sm_clock / 1e6


def _rows(file: dict[str, Any]) -> Iterator[GpuRow]:
    """Rows of a file; one with several sizes of memory is several."""
    for cells in file["rows"]:
        row = dict(zip(file["columns"], cells, strict=False))
        sizes = row["memory_gb"] if isinstance(row["memory_gb"], list) else [row["memory_gb"]]
        yield from (GpuRow(**{**row, "memory_gb": size}) for size in sizes)


ROWS: tuple[GpuRow, ...] = tuple(row for file in _FILES for row in _rows(file))
"""The table, in its order."""


# GPU names taken apart: what people type, and what NVML says, as sets of words that can be compared.


_MAKERS: dict[str, str] = {word: vendor for vendor, words in _NAMES["makers"].items() for word in words}
"""Words that say whose card it is -> the maker."""
_NOISE = frozenset(_MAKERS) | frozenset(_NAMES["noise"])
"""Words that tell no two cards of the table apart."""
_SAME: dict[str, str] = _NAMES["same"]
_WEAK = frozenset(_NAMES["weak"])
"""Words that say something of a card, but not which one it is."""


@functools.lru_cache(maxsize=1024)
def words(text: str) -> frozenset[str]:
    """The words that identify a card: "GeForce RTX 4070 Ti SUPER", "rtx4070tisuper" -> 4070, ti, super."""
    plain = re.sub(r"max[-_ ]?q", " maxq ", text.lower())
    plain = re.sub(r"[^a-z0-9]+", " ", plain)
    for name, meaning in _NAMES["other_names"].items():
        plain = re.sub(rf"\b{name}\b", meaning, plain)
    plain = re.sub(rf"\b({'|'.join(_MAKERS)})(?=[a-z]*\d)", r"\1 ", plain)
    plain = re.sub(r"\b(titan|m[1-9])(?=[a-z]+\b)", r"\1 ", plain)
    plain = re.sub(r"\b(mi|w|r) (?=\d{2,4})", r"\1", plain)
    plain = re.sub(r"\b(\d{4}(?=[a-z])|\d{3}(?=ti\b))", r"\1 ", plain)
    plain = re.sub(r"\b(ti|super)(?=(s|super|laptop|mobile)\b)", r"\1 ", plain)
    plain = re.sub(r"\b(\d+) ?(?:gb?|gib)\b", r"\1gb", plain)
    plain = re.sub(r"\bsxm\d?\b", "sxm", plain)
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
    vendor: str = "NVIDIA"
    architecture: str = ""
    """Key of `ARCHITECTURES`; "" of a card whose figures the user gave."""
    tflops: float
    """Dense 16-bit peak with fp32 accumulation, TFLOP/s. Of a laptop GPU at the highest power it is sold with."""
    bf16: bool
    """Whether bfloat16 runs at that rate; if not, only fp16 does (and on GTX 16 neither: see `fp16_share`)."""
    tensor_cores: bool
    """Whether 16-bit products are faster than fp32's, which else run at that rate, too."""
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
    note: str = ""
    """Words for its user."""
    devices: int = 1
    """As how many devices the driver lists one card; all figures are those of one device."""

    @property
    def is_unified(self) -> bool:
        """Whether its memory is the computer's."""
        return self.architecture in ARCHITECTURES and ARCHITECTURES[self.architecture].system_gib is not None

    @property
    def usable_bytes(self) -> int:
        """What programs can get: all of a card's own memory; of a computer's, what the system leaves to the GPU."""
        if not self.is_unified:
            return self.total_bytes
        kind = ARCHITECTURES[self.architecture]
        share = kind.gpu_share_below_36_gb if self.memory_gb < _SMALL_COMPUTER_GB else None
        left = self.total_bytes - round((kind.system_gib or 0) * 2**30)
        return max(0, min(left, round(self.memory_gb * 2**30 * (share or kind.gpu_share))))

    @property
    def untrained(self) -> str:
        """Why gangline's trainer cannot use it yet; "" where it can."""
        if self.vendor != "NVIDIA":
            return f"gangline trains on NVIDIA GPUs only, and this is one of {self.vendor}"
        if self.compute_capability and needed_cuda(self.compute_capability) is None:
            return f"no torch that gangline knows has kernels for its compute capability, {self.compute_capability}"
        return ""

    @property
    def total_bytes(self) -> int:
        """What NVML reports as total, or 98 % of what was sold where that is not known."""
        return self.visible_bytes or round(self.memory_gb * 2**30 * _VISIBLE_SHARE)


_SMALL_COMPUTER_GB = 36


def _spec(row: GpuRow) -> GpuSpec:
    architecture = ARCHITECTURES[row.architecture]
    tflops = row.stated_tflops or row.computed_tflops
    assert tflops is not None, f"{row.name}: neither a rate nor SMs and clock"
    return GpuSpec(
        name=row.name,
        vendor=architecture.vendor,
        architecture=row.architecture,
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
        note=row.note,
        devices=row.devices,
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


OWN_FIGURES: dict[str, tuple[float, float]] = {
    "tflops_bf16": (0.1, 20_000),
    "memory_gib": (1, 2048),
    "bandwidth_gbs": (1, 50_000),
    "power_w": (1, 5000),
}
"""What describes a card that is in no list -> its least and largest value; all but the power are needed."""


def own_gpu(*, tflops_bf16: float, memory_gib: float, bandwidth_gbs: float, power_w: float = math.inf) -> GpuSpec:
    """A card that is in no list, by the figures that its owner gives: dense TFLOP/s in bf16 with sums in fp32, GiB of
    memory, GB/s of its bandwidth. It is taken to be NVIDIA's, with tensor cores and all the power that it needs.
    """
    return GpuSpec(
        name="own figures",
        tflops=tflops_bf16,
        bf16=True,
        tensor_cores=True,
        fp16_share=1.0,
        memory_gb=memory_gib,
        visible_bytes=round(memory_gib * 2**30),
        bandwidth_gb_s=bandwidth_gbs,
        compute_capability="",
        power_w=power_w,
        laptop=False,
        measured_tflops=None,
        source="own figures",
    )


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
    ones with 80 GB. None where nothing fits, see `suggest_gpus`, or several cards do, see `meanings`.

    total_bytes: the memory that NVML reports, to tell apart cards of one name (a 3080 with 10 or 12 GB), and those of
        which only a part of the name is said ("Orin" of Jetson's modules).
    """
    found = _named(GPUS, text) or _named(all_gpus(), text) or ([] if meanings(text) else _closest(text))
    if not found:
        return None
    if total_bytes is None:
        return found[0]
    as_near = [gpu for gpu in found if _unsaid(gpu, words(text)) == _unsaid(found[0], words(text))]
    return min(as_near, key=lambda gpu: abs(gpu.total_bytes - total_bytes))


def _named(gpus: Sequence[GpuSpec], text: str) -> list[GpuSpec]:
    return [gpu for gpu in gpus if gpu.name == _bare(text)]


def _bare(name: str) -> str:
    return re.sub(r"^(NVIDIA|AMD|Intel\(R\)|Intel) ", "", name.strip())


def meanings(text: str) -> tuple[str, ...]:
    """What to type for each of the cards that a name may mean: of "rtx6000" three; () for a name of one card."""
    several: dict[str, list[str]] = _NAMES["several"]
    told = re.search("quadro|gtx", text.lower())  # words that tell these apart, and no others
    return () if told else tuple(several.get(" ".join(sorted(words(text))), ()))


def accelerator(text: str) -> str | None:
    """What an accelerator is that is no GPU, such as "Google's TPU"; None where a name means none."""
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower())
    known: dict[str, str] = _NAMES["no_gpus"]
    return next((whose for pattern, whose in known.items() if re.search(rf"\b(?:{pattern})\b", plain)), None)


def sizes_of(spec: GpuSpec) -> list[float]:
    """The memory sizes, GB, that cards of this name have, in the table's order."""
    return [gpu.memory_gb for gpu in all_gpus() if gpu.name == spec.name]


def _closest(text: str) -> list[GpuSpec]:
    """Cards with all the words, those with the fewest further words first; the table's order decides between equals."""
    wanted, whose = words(text), {_MAKERS[word] for word in re.findall("[a-z]+", text.lower()) if word in _MAKERS}
    if not naming(wanted):
        return []
    of_makers = [gpu for gpu in all_gpus() if not whose or gpu.vendor in whose]
    fitting = [gpu for gpu in of_makers if wanted <= words(gpu.name) | _may_add(gpu)]
    return sorted(fitting, key=lambda gpu: _unsaid(gpu, wanted))


def _unsaid(gpu: GpuSpec, wanted: frozenset[str]) -> int:
    """How many words of a card's name were not said, its memory apart."""
    return sum(not is_memory(word) for word in words(gpu.name) - wanted)


def _may_add(gpu: GpuSpec) -> frozenset[str]:
    """Words that people add and NVML does not say."""
    also = {f"{gpu.memory_gb:g}gb"}
    if gpu.laptop:
        also.add("laptop")
    if gpu.name in {"B200", "GB200"}:
        also.add("192gb")  # as announced; fewer can be used
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

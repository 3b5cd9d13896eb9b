"""Simulated NVIDIA cards for lab hosts. No figure that comes from them says anything about a GPU.

    from tests.lab import gpus

    gpus.install(host, [gpus.RTX_5070_TI, gpus.like(gpus.RTX_5070_TI, used_mb=9000, processes={4711: 8800})])
    gpus.install(host, [gpus.RTX_3090], driver="525.147.05", cuda="12.0")
    gpus.install(host, [], problem="mismatch")     # also: no-devices, no-driver

A host gets `libnvidia-ml.so.1`, built here from simulated/nvml.c, where ctypes and nvidia-ml-py find it, and a program
`nvidia-smi` that replays text. The text is written here after the public formats, not recorded. torch sees no card.
"""

import dataclasses
import functools
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tests.lab.namespaces import HERE, LabFailed

FOLDER = "/etc/gangline-lab"
POWER_CAP, SLOWDOWN, HOT_DRIVER, HOT_HARDWARE, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
"""Reasons for lower clocks, as bits of NVML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card, as NVML and nvidia-smi tell it. None: not supported."""

    name: str
    memory_mb: int
    compute_capability: str
    used_mb: int = 4
    processes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Process id -> MiB that it holds (part of used_mb)."""
    utilization: int = 0
    temperature_c: int = 38
    power_w: float = 20
    power_limit_w: float = 300
    throttle: int = 0
    """See POWER_CAP and the others; 1: idle."""
    ecc_uncorrected: int | None = None
    pcie_generation: int = 5
    pcie_generation_max: int = 5
    pcie_width: int = 16
    pcie_width_max: int = 16
    mig: int | None = None
    is_lost: bool = False


def like(card: Gpu, **changes: object) -> Gpu:
    """The same card, but for the changes."""
    return dataclasses.replace(card, **changes)


RTX_5070_TI = Gpu(name="NVIDIA GeForce RTX 5070 Ti", memory_mb=16303, compute_capability="12.0")
RTX_4070 = Gpu(name="NVIDIA GeForce RTX 4070", memory_mb=12282, compute_capability="8.9", power_limit_w=200)
RTX_3090 = Gpu(name="NVIDIA GeForce RTX 3090", memory_mb=24576, compute_capability="8.6", power_limit_w=350)
H100 = Gpu(
    name="NVIDIA H100 80GB HBM3", memory_mb=81559, compute_capability="9.0", power_limit_w=700, ecc_uncorrected=0, mig=0
)

PROBLEMS = {
    "no-devices": (0, 6, "No devices were found\n"),
    "mismatch": (
        18,
        18,
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.172\n",
    ),
    "no-driver": (
        9,
        9,
        """NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.

""",
    ),
}
"""Name -> what nvmlInit says, how nvidia-smi ends, and what it prints."""


def install(
    host,
    cards: Sequence[Gpu],
    *,
    driver: str = "570.172.08",
    cuda: str = "12.8",
    problem: str | None = None,
    topology: str | None = None,
    library: bool = True,
    program: bool = True,
) -> None:
    """Give a host these cards. topology: what `nvidia-smi topo -m` prints; library, program: whether it has them."""
    code, exit_code, words = PROBLEMS[problem] if problem else (0, 0, "")
    major, minor = (int(part) for part in cuda.split("."))
    settings = {"driver": driver, "nvml": f"12.{driver}", "cuda": major * 1000 + minor * 10, "error": code}
    host.write(
        f"{FOLDER}/gpus", "".join([*_lines(settings), *(_section(index, card) for index, card in enumerate(cards))])
    )
    if library:
        host.write(f"{_library_folder()}/libnvidia-ml.so.1", _library(), 0o755)
    if not program:
        return
    said = {"error": words, "code": str(exit_code)} if words else _texts(cards, driver, cuda, topology)
    host.check(["rm", "-rf", f"{FOLDER}/nvidia-smi"], as_root=True)
    for name, text in said.items():
        host.write(f"{FOLDER}/nvidia-smi/{name}", text)
    host.write("/usr/bin/nvidia-smi", (HERE / "simulated" / "nvidia-smi.sh").read_text(), 0o755)


@functools.cache
def _library() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libnvidia-ml.so.1"
        argv = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
            path,
        ]
        done = subprocess.run([*argv, HERE / "simulated" / "nvml.c"], capture_output=True, text=True)
        if done.returncode:
            raise LabFailed(done.stderr)
        return path.read_bytes()


@functools.cache
def _library_folder() -> str:
    """A folder that the loader looks into without a cache."""
    kind = subprocess.run(["gcc", "-print-multiarch"], capture_output=True, text=True).stdout.strip()
    folders = [f"/usr/lib/{kind}"] if kind else []
    return next(folder for folder in [*folders, "/usr/lib64", "/usr/lib"] if Path(folder).is_dir())


def _lines(values: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}\n" for key, value in values.items() if value is not None]


def bus_id(index: int) -> str:
    """Where card number `index` sits."""
    return f"00000000:{index + 1:02X}:00.0"


def uuid(index: int) -> str:
    """What card number `index` is called."""
    return f"GPU-51ab0000-0000-4000-8000-{index:012x}"


def _section(index: int, card: Gpu) -> str:
    values = {
        "name": card.name,
        "uuid": uuid(index),
        "bus_id": bus_id(index),
        "memory_total": card.memory_mb << 20,
        "memory_used": card.used_mb << 20,
        "compute_capability": card.compute_capability.replace(".", ""),
        "utilization": card.utilization,
        "temperature": card.temperature_c,
        "power": round(card.power_w * 1000),
        "power_limit": round(card.power_limit_w * 1000),
        "throttle": card.throttle,
        "ecc_uncorrected": card.ecc_uncorrected,
        "pcie_generation": card.pcie_generation,
        "pcie_generation_max": card.pcie_generation_max,
        "pcie_width": card.pcie_width,
        "pcie_width_max": card.pcie_width_max,
        "mig": card.mig,
        "processes": ",".join(f"{pid}:{used << 20}" for pid, used in card.processes.items()) or None,
        "lost": 1 if card.is_lost else None,
    }
    return "".join(["gpu\n", *_lines(values)])


def _texts(cards: Sequence[Gpu], driver: str, cuda: str, topology: str | None) -> dict[str, str]:
    """What nvidia-smi says, by question."""
    if not cards:
        return {"error": "No devices were found\n", "code": "6"}
    rows = [_row(index, card, driver) for index, card in enumerate(cards)]
    held = [
        {"gpu_uuid": uuid(index), "pid": pid, "process_name": "python3", "used_memory": used}
        for index, card in enumerate(cards)
        for pid, used in card.processes.items()
    ]
    return {
        "gpus": _table(rows, UNITS),
        "processes": _table(
            held or [dict.fromkeys(("gpu_uuid", "pid", "process_name", "used_memory"), "")], UNITS, len(held)
        ),
        "list": "".join(f"GPU {index}: {card.name} (UUID: {uuid(index)})\n" for index, card in enumerate(cards)),
        "topology": topology or matrix(len(cards)),
        "xml": _xml(cards, driver, cuda),
        "screen": f"simulated | NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: {cuda} |\n",
    }


UNITS = {
    **dict.fromkeys(("memory.total", "memory.used", "memory.free", "used_memory"), "MiB"),
    **dict.fromkeys(("power.draw", "power.limit", "enforced.power.limit"), "W"),
    "utilization.gpu": "%",
}


def _row(index: int, card: Gpu, driver: str) -> dict[str, object]:
    ecc = "[N/A]" if card.ecc_uncorrected is None else card.ecc_uncorrected
    mig = "[N/A]" if card.mig is None else "Enabled" if card.mig else "Disabled"
    if card.is_lost:
        return dict.fromkeys(_row(index, like(card, is_lost=False), driver), "[GPU is lost]") | {"index": index}
    return {
        "index": index,
        "name": card.name,
        "uuid": uuid(index),
        "gpu_uuid": uuid(index),
        "driver_version": driver,
        "pci.bus_id": bus_id(index),
        "compute_cap": card.compute_capability,
        "memory.total": card.memory_mb,
        "memory.used": card.used_mb,
        "memory.free": card.memory_mb - card.used_mb,
        "utilization.gpu": card.utilization,
        "temperature.gpu": card.temperature_c,
        "power.draw": f"{card.power_w:.2f}",
        "power.limit": f"{card.power_limit_w:.2f}",
        "enforced.power.limit": f"{card.power_limit_w:.2f}",
        "pcie.link.gen.current": card.pcie_generation,
        "pcie.link.gen.max": card.pcie_generation_max,
        "pcie.link.width.current": card.pcie_width,
        "pcie.link.width.max": card.pcie_width_max,
        "ecc.errors.uncorrected.volatile.total": ecc,
        "mig.mode.current": mig,
        "clocks_throttle_reasons.active": f"0x{card.throttle:016x}",
        "clocks_event_reasons.active": f"0x{card.throttle:016x}",
    }


def _table(rows: Sequence[Mapping[str, object]], units: Mapping[str, str], count: int | None = None) -> str:
    names = list(rows[0])
    lines = [
        names,
        [units.get(name, "") for name in names],
        *([str(row[name]) for name in names] for row in rows[:count]),
    ]
    return "".join("\t".join(line) + "\n" for line in lines)


def matrix(
    num_cards: int, *, link: str = "PHB", nics: Sequence[str] = (), far: Mapping[tuple[int, int], str] | None = None
) -> str:
    """What `topo -m` prints for so many cards. link: between any two (PIX, PHB, NODE, SYS, NV18); far: pairs that differ."""
    names = [f"GPU{index}" for index in range(num_cards)] + [f"NIC{index}" for index in range(len(nics))]
    lines = ["\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for row, name in enumerate(names):
        links = []
        for column in range(len(names)):
            pair = (min(row, column), max(row, column))
            nic = pair[1] >= num_cards and link.startswith("NV")
            links.append(" X " if row == column else (far or {}).get(pair, "PHB" if nic else link))
        lines.append("\t".join([name, *links, *(["0-15", "0", "N/A"] if row < num_cards else [])]))
    legend = "".join(f"  NIC{index}: {nic}\n" for index, nic in enumerate(nics))
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n" + (f"\nNIC Legend:\n\n{legend}" if nics else "")


def _xml(cards: Sequence[Gpu], driver: str, cuda: str) -> str:
    body = "".join(_xml_card(index, card) for index, card in enumerate(cards))
    return (
        '<?xml version="1.0" ?>\n<!-- simulated: no GPU is behind this -->\n<nvidia_smi_log>\n'
        f"\t<driver_version>{driver}</driver_version>\n\t<cuda_version>{cuda}</cuda_version>\n"
        f"\t<attached_gpus>{len(cards)}</attached_gpus>\n{body}</nvidia_smi_log>\n"
    )


def _xml_card(index: int, card: Gpu) -> str:
    ecc = "N/A" if card.ecc_uncorrected is None else str(card.ecc_uncorrected)
    held = "".join(
        f"<process_info><pid>{pid}</pid><type>C</type><process_name>python3</process_name>"
        f"<used_memory>{used} MiB</used_memory></process_info>"
        for pid, used in card.processes.items()
    )
    link = (
        f"<pcie_gen><max_link_gen>{card.pcie_generation_max}</max_link_gen>"
        f"<current_link_gen>{card.pcie_generation}</current_link_gen></pcie_gen>"
        f"<link_widths><max_link_width>{card.pcie_width_max}x</max_link_width>"
        f"<current_link_width>{card.pcie_width}x</current_link_width></link_widths>"
    )
    reasons = "".join(
        f"<clocks_event_reason_{name}>{'Active' if card.throttle & bit else 'Not Active'}</clocks_event_reason_{name}>"
        for name, bit in {
            "gpu_idle": 1,
            "sw_power_cap": POWER_CAP,
            "hw_slowdown": SLOWDOWN,
            "hw_thermal_slowdown": HOT_HARDWARE,
            "hw_power_brake_slowdown": POWER_BRAKE,
            "sw_thermal_slowdown": HOT_DRIVER,
        }.items()
    )
    return (
        f'\t<gpu id="{bus_id(index)}">\n\t\t<product_name>{escape(card.name)}</product_name>\n\t\t<uuid>{uuid(index)}</uuid>\n'
        f"\t\t<pci><pci_bus_id>{bus_id(index)}</pci_bus_id><pci_gpu_link_info>{link}</pci_gpu_link_info></pci>\n"
        f"\t\t<fb_memory_usage><total>{card.memory_mb} MiB</total><used>{card.used_mb} MiB</used>"
        f"<free>{card.memory_mb - card.used_mb} MiB</free></fb_memory_usage>\n"
        f"\t\t<utilization><gpu_util>{card.utilization} %</gpu_util></utilization>\n"
        f"\t\t<clocks_event_reasons>{reasons}</clocks_event_reasons>\n"
        f"\t\t<ecc_errors><volatile><dram_uncorrectable>{ecc}</dram_uncorrectable></volatile></ecc_errors>\n"
        f"\t\t<temperature><gpu_temp>{card.temperature_c} C</gpu_temp></temperature>\n"
        f"\t\t<gpu_power_readings><power_draw>{card.power_w:.2f} W</power_draw>"
        f"<current_power_limit>{card.power_limit_w:.2f} W</current_power_limit></gpu_power_readings>\n"
        f"\t\t<processes>{held}</processes>\n\t</gpu>\n"
    )

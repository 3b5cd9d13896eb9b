"""The NVIDIA cards of this host: by the library, else by nvidia-smi, else why there are none."""

from __future__ import annotations

import csv
import ctypes
import re
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from gangline.agent.bounded import Output, run
from gangline.agent.host_facts.system import meminfo
from gangline.agent.host_files import read_number, read_text

# nvidia-smi: what it says where the library cannot be asked, and how the cards are joined.


COLUMNS = {
    "index": "index",
    "name": "name",
    "uuid": "uuid",
    "memory.total": "memory_total_bytes",
    "memory.free": "memory_free_bytes",
    "compute_cap": "compute_capability",
    "pci.bus_id": "pci",
    "pcie.link.gen.current": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "enforced.power.limit": "power_limit_w",
    "utilization.gpu": "utilization_percent",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "mig.mode.current": "mig",
    "driver_version": "driver",
}
"""What nvidia-smi calls it -> what we call it."""
TEXTS = {"name", "uuid", "compute_capability", "pci", "driver"}
FAULTS = {
    "driver/library version mismatch": "mismatch",
    "gpu is lost": "lost",
    "communicate with the nvidia driver": "driver-not-loaded",
    "insufficient permissions": "no-permission",
}
TOPOLOGY_BYTES = 1 << 16


def path() -> Optional[str]:
    """Where nvidia-smi is; WSL has it in a folder of its own."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")


def query(program: str) -> Dict[str, Any]:
    """Cards and faults as nvidia-smi lists them."""
    output = run([program, "--query-gpu=" + ",".join(COLUMNS), "--format=csv,noheader,nounits"])
    words = (output.stdout + output.stderr).strip()
    if output.returncode != 0 and not _rows(output):
        kind = next((kind for text, kind in FAULTS.items() if text in words.lower()), None)
        if kind is None and "no devices were found" in words.lower():
            return {"cards": [], "faults": [], "driver": None, "reason": None}
        return {"cards": [], "faults": [], "driver": None, "reason": {"kind": kind or "other", "text": words[:500]}}
    rows = _rows(output)
    drivers = [driver for row in rows if (driver := row.pop("driver", None))]
    faults = [row for row in rows if row.get("name") is None]
    return {
        "cards": [row for row in rows if row.get("name") is not None],
        "faults": [{"index": row["index"] or 0, "kind": "lost", "text": "GPU is lost"} for row in faults],
        "driver": drivers[0] if drivers else None,
        "reason": None,
    }


def _rows(output: Output) -> List[Dict[str, Any]]:
    rows = [row for row in csv.reader(output.stdout.splitlines(), skipinitialspace=True) if len(row) == len(COLUMNS)]
    return [{ours: _value(ours, text.strip()) for ours, text in zip(COLUMNS.values(), row)} for row in rows]


def _value(column: str, text: str) -> Any:
    if text.startswith("[") or text in {"N/A", ""}:
        return None
    if column in TEXTS:
        return text.lower() if column == "pci" else text
    if column == "mig":
        return text == "Enabled"
    try:
        number = float(text)
    except ValueError:
        return None
    if column.endswith("_bytes"):
        return int(number) << 20
    return number if column.endswith("_w") else int(number)


def topology(_request: Dict[str, Any]) -> Optional[str]:
    """What `nvidia-smi topo -m` prints; None without it."""
    program = path()
    if program is None:
        return None
    output = run([program, "topo", "-m"], limit_bytes=TOPOLOGY_BYTES)
    return output.stdout if output.returncode == 0 else None


# NVIDIA's management library by ctypes, so that a host needs no package for it.


LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
"""The second is where WSL has it; not every distribution there puts it on the loader's path."""
NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, MISMATCH = 4, 9, 12, 15, 16, 18
KINDS = {
    NO_PERMISSION: "no-permission",
    DRIVER_NOT_LOADED: "driver-not-loaded",
    LIBRARY_NOT_FOUND: "no-library",
    GPU_IS_LOST: "lost",
    RESET_REQUIRED: "lost",
    MISMATCH: "mismatch",
}
POWER_CAP = "power cap"
THROTTLES = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Reasons for lower clocks. Not here: an idle card, clocks that somebody set, display and sync."""
MAX_PROCESSES = 64
NOT_SAID = (1 << 64) - 1


class NvmlError(Exception):
    """The library said no."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.kind = KINDS.get(code, "other")


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus_id", ctypes.c_char * 32),
    ]


class Library:
    """The loaded library; raises NvmlError where there is none, or where it cannot start."""

    def __init__(self) -> None:
        self.path, self._library = _load()
        self.call("nvmlInit_v2")

    @property
    def is_simulated(self) -> bool:
        """Whether this is a stand-in for tests, which says so by a symbol of this name."""
        return hasattr(self._library, "gangline_simulated")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raises NvmlError for what it refuses and for what this version does not have."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(0, f"{name} is not in {self.path}") from None
        if code := int(function(*arguments)):
            raise NvmlError(code, f"{self._words(code)} ({name})")

    def answers(self, name: str, *arguments: Any) -> bool:
        """Call a function; False where it refuses. Raises NvmlError for a card that is lost: nothing more is asked."""
        try:
            self.call(name, *arguments)
        except NvmlError as error:
            if error.kind == "lost":
                raise
            return False
        return True

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> Optional[int]:
        """The number that a function gives back through its last argument; None where it cannot say."""
        value = kind()
        return int(value.value) if self.answers(name, *arguments, ctypes.byref(value)) else None

    def text(self, name: str, *arguments: Any, size: int = 96) -> Optional[str]:
        """The text that a function writes into a buffer; None where it cannot say."""
        buffer = ctypes.create_string_buffer(size)
        answered = self.answers(name, *arguments, buffer, ctypes.c_uint(size))
        return buffer.value.decode("utf-8", "replace") if answered else None

    def close(self) -> None:
        """Let go of the library's state."""
        self._library.nvmlShutdown()

    def _words(self, code: int) -> str:
        try:
            say = self._library.nvmlErrorString
            say.restype = ctypes.c_char_p
            words: bytes = say(code) or b""
            return words.decode("utf-8", "replace") or f"error {code}"
        except AttributeError:
            return f"error {code}"


def _load() -> Tuple[str, Any]:
    reasons = []
    for path in LIBRARIES:
        try:
            return path, ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    raise NvmlError(LIBRARY_NOT_FOUND, reasons[0])


def cards(library: Library) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """What there is to say of every card, and what is wrong with those that do not answer."""
    found, faults = [], []
    for index in range(library.number("nvmlDeviceGetCount_v2") or 0):
        device = ctypes.c_void_p()
        try:
            library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            found.append(_card(library, device, index))
        except NvmlError as error:
            faults.append({"index": index, "kind": error.kind, "text": str(error)})
    return found, faults


def uuids() -> List[str]:
    """UUIDs of the cards in the library's order, which is that of their bus addresses; [] where it cannot be asked."""
    try:
        library = Library()
    except NvmlError:
        return []
    try:
        return [row["uuid"] for row in cards(library)[0] if row["uuid"]]
    except NvmlError:
        return []
    finally:
        library.close()


NUMBERS = {
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_generation_max": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_max": "nvmlDeviceGetMaxPcieLinkWidth",
}
"""Our name of a number -> the function that gives it."""


def _card(library: Library, device: ctypes.c_void_p, index: int) -> Dict[str, Any]:
    pci = _Pci()
    has_pci = library.answers("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
    numbers = {name: library.number(function, device) for name, function in NUMBERS.items()}
    capability = _pair(library, "nvmlDeviceGetCudaComputeCapability", device)
    mig = _pair(library, "nvmlDeviceGetMigMode", device)
    limit = library.number("nvmlDeviceGetEnforcedPowerLimit", device)
    return {
        "index": index,
        "name": library.text("nvmlDeviceGetName", device),
        "uuid": library.text("nvmlDeviceGetUUID", device),
        "compute_capability": "{}.{}".format(*capability) if capability else None,
        "pci": (pci.bus_id.decode("ascii", "replace").lower() or None) if has_pci else None,
        **numbers,
        "power_limit_w": None if limit is None else limit / 1000,
        "mig": bool(mig[0]) if mig else None,
        **moment(library, device),
    }


def moment(library: Library, device: ctypes.c_void_p) -> Dict[str, Any]:
    """What changes from one moment to the next. Raises NvmlError for a card that is lost."""
    memory, rates = _Memory(), _Utilization()
    has_memory = library.answers("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))  # else it is the computer's
    power = library.number("nvmlDeviceGetPowerUsage", device)
    reasons = library.number("nvmlDeviceGetCurrentClocksEventReasons", device, kind=ctypes.c_ulonglong)
    if reasons is None:
        reasons = library.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)
    has_rates = library.answers("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates))
    uncorrected_since_boot = (device, ctypes.c_uint(1), ctypes.c_uint(0))
    return {
        "memory_total_bytes": int(memory.total) if has_memory else None,
        "memory_free_bytes": int(memory.free) if has_memory else None,
        "temperature_c": library.number("nvmlDeviceGetTemperature", device, ctypes.c_uint(0)),
        "power_w": None if power is None else power / 1000,
        "throttle": [words for bit, words in THROTTLES.items() if reasons and reasons & bit],
        "utilization_percent": int(rates.gpu) if has_rates else None,
        "ecc_uncorrected": library.number(
            "nvmlDeviceGetTotalEccErrors", *uncorrected_since_boot, kind=ctypes.c_ulonglong
        ),
        "processes": _processes(library, device),
    }


def _pair(library: Library, name: str, device: ctypes.c_void_p) -> Optional[Tuple[int, int]]:
    """The two numbers that a function gives back through its last arguments; None where it cannot say."""
    first, second = ctypes.c_uint(), ctypes.c_uint()
    answered = library.answers(name, device, ctypes.byref(first), ctypes.byref(second))
    return (first.value, second.value) if answered else None


def _processes(library: Library, device: ctypes.c_void_p) -> List[Dict[str, Any]]:
    """Who computes on it, as far as this host can see them: not from inside a container."""
    count = ctypes.c_uint(MAX_PROCESSES)
    rows = (_Process * MAX_PROCESSES)()
    if not library.answers("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), rows):
        return []
    return [
        {
            "pid": int(row.pid),
            "memory_bytes": None if row.used == NOT_SAID else int(row.used),
            "name": read_text(f"/proc/{row.pid}/comm"),
        }
        for row in rows[: min(count.value, MAX_PROCESSES)]
    ]


KERNEL_MODULE = "/proc/driver/nvidia/version"


def gpus(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Cards, faults, versions, and the reason why there are none."""
    try:
        found = _by_library()
    except NvmlError as error:
        found = _nothing({"kind": error.kind, "text": str(error)})
        program = path()
        if error.kind == "no-library" and program is not None:
            found = {**found, **query(program), "source": "nvidia-smi"}
    for card in found["cards"]:
        card["numa_node"] = numa_node(card.get("pci"))
        if card.get("memory_total_bytes") is None:
            card.update(_shared_memory())
    return {**found, **kernel_module(KERNEL_MODULE), "on_the_bus": on_the_bus(Path("/sys/bus/pci/devices"))}


def _by_library() -> Dict[str, Any]:
    library = Library()
    try:
        found, faults = cards(library)
        return {
            "source": library.path,
            "simulated": library.is_simulated,
            "driver": library.text("nvmlSystemGetDriverVersion"),
            "cuda": _cuda(library.number("nvmlSystemGetCudaDriverVersion_v2")),
            "cards": found,
            "faults": faults,
            "reason": None,
        }
    finally:
        library.close()


def _nothing(error: Dict[str, str]) -> Dict[str, Any]:
    return {
        "source": None,
        "simulated": False,
        "driver": None,
        "cuda": None,
        "cards": [],
        "faults": [],
        "reason": error,
    }


def _shared_memory() -> Dict[str, Any]:
    """The memory of a card that has none of its own, such as GB10: the computer's."""
    rows = meminfo()
    return {
        "memory_total_bytes": rows.get("MemTotal", 0),
        "memory_free_bytes": rows.get("MemAvailable", 0),
        "unified_memory": True,
    }


def _cuda(number: Optional[int]) -> Optional[str]:
    """12080 -> "12.8": the newest CUDA that the driver knows."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def kernel_module(place: str) -> Dict[str, Any]:
    """The version of the loaded kernel module, and whether it is the open one, which shares memory with network cards
    without nvidia_peermem.
    """
    line = (read_text(place) or "").partition("\n")[0]
    if not line:
        return {"module": None, "open_module": None}
    version = re.search(r"\b\d{3}\.\d+(\.\d+)*\b", line)
    return {"module": version[0] if version else None, "open_module": "Open Kernel Module" in line}


def numa_node(pci: Any) -> Optional[int]:
    """The NUMA node of a PCI address; NVML writes its domain with eight digits, sysfs with four."""
    if not isinstance(pci, str):
        return None
    domain, _, rest = pci.partition(":")
    return read_number(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")


def on_the_bus(root: Path) -> int:
    """How many NVIDIA display adapters the kernel sees, with or without a driver."""
    cards = [device for device in root.glob("*") if read_text(device / "vendor") == "0x10de"]
    return sum((read_text(device / "class") or "").startswith("0x03") for device in cards)

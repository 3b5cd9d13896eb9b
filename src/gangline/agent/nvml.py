"""NVIDIA's management library by ctypes, so that a host needs no package for it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

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
THROTTLES = {
    0x4: "power cap",
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

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> Optional[int]:
        """The number that a function gives back through its last argument; None where it cannot say."""
        value = kind()
        try:
            self.call(name, *arguments, ctypes.byref(value))
        except NvmlError as error:
            if error.kind == "lost":
                raise
            return None
        return int(value.value)

    def text(self, name: str, *arguments: Any, size: int = 96) -> Optional[str]:
        """The text that a function writes into a buffer; None where it cannot say."""
        buffer = ctypes.create_string_buffer(size)
        try:
            self.call(name, *arguments, buffer, ctypes.c_uint(size))
        except NvmlError as error:
            if error.kind == "lost":
                raise
            return None
        return buffer.value.decode("utf-8", "replace")

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


def _card(library: Library, device: ctypes.c_void_p, index: int) -> Dict[str, Any]:
    total, free = _memory(library, device)
    return {
        "index": index,
        "name": library.text("nvmlDeviceGetName", device),
        "uuid": library.text("nvmlDeviceGetUUID", device),
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "compute_capability": _capability(library, device),
        **_bus(library, device),
        **_condition(library, device),
        "processes": _processes(library, device),
    }


def _memory(library: Library, device: ctypes.c_void_p) -> Tuple[Optional[int], Optional[int]]:
    """Total and free; unknown for a card that uses the computer's own memory."""
    memory = _Memory()
    try:
        library.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    except NvmlError as error:
        if error.kind == "lost":
            raise
        return None, None
    return int(memory.total), int(memory.free)


def _capability(library: Library, device: ctypes.c_void_p) -> Optional[str]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        library.call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    except NvmlError:
        return None
    return f"{major.value}.{minor.value}"


def _bus(library: Library, device: ctypes.c_void_p) -> Dict[str, Any]:
    """Where it sits on the PCI bus, and how wide and fast its link is: now, and at best."""
    pci = _Pci()
    bus_id = None
    try:
        library.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
        bus_id = pci.bus_id.decode("ascii", "replace").lower() or None
    except NvmlError:
        pass
    return {
        "pci": bus_id,
        "pcie_generation": library.number("nvmlDeviceGetCurrPcieLinkGeneration", device),
        "pcie_generation_max": library.number("nvmlDeviceGetMaxPcieLinkGeneration", device),
        "pcie_width": library.number("nvmlDeviceGetCurrPcieLinkWidth", device),
        "pcie_width_max": library.number("nvmlDeviceGetMaxPcieLinkWidth", device),
    }


def _condition(library: Library, device: ctypes.c_void_p) -> Dict[str, Any]:
    """Heat, power, what slows it down, memory errors, and whether it is cut into instances."""
    reasons = library.number("nvmlDeviceGetCurrentClocksEventReasons", device, kind=ctypes.c_ulonglong)
    if reasons is None:
        reasons = library.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)
    power = library.number("nvmlDeviceGetPowerUsage", device)
    limit = library.number("nvmlDeviceGetEnforcedPowerLimit", device)
    return {
        "temperature_c": library.number("nvmlDeviceGetTemperature", device, ctypes.c_uint(0)),
        "power_w": None if power is None else power / 1000,
        "power_limit_w": None if limit is None else limit / 1000,
        "throttle": [words for bit, words in THROTTLES.items() if reasons and reasons & bit],
        "utilization_percent": _utilization(library, device),
        # uncorrected, since the driver was loaded
        "ecc_uncorrected": library.number(
            "nvmlDeviceGetTotalEccErrors", device, ctypes.c_uint(1), ctypes.c_uint(0), kind=ctypes.c_ulonglong
        ),
        "mig": _mig(library, device),
    }


def _utilization(library: Library, device: ctypes.c_void_p) -> Optional[int]:
    rates = _Utilization()
    try:
        library.call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates))
    except NvmlError:
        return None
    return int(rates.gpu)


def _mig(library: Library, device: ctypes.c_void_p) -> Optional[bool]:
    now, later = ctypes.c_uint(), ctypes.c_uint()
    try:
        library.call("nvmlDeviceGetMigMode", device, ctypes.byref(now), ctypes.byref(later))
    except NvmlError:
        return None
    return bool(now.value)


def _processes(library: Library, device: ctypes.c_void_p) -> List[Dict[str, Any]]:
    """Who computes on it, as far as this host can see them: not from inside a container."""
    count = ctypes.c_uint(MAX_PROCESSES)
    rows = (_Process * MAX_PROCESSES)()
    try:
        library.call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), rows)
    except NvmlError:
        return []
    return [
        {
            "pid": int(row.pid),
            "memory_bytes": None if row.used == NOT_SAID else int(row.used),
            "name": _command(row.pid),
        }
        for row in rows[: min(count.value, MAX_PROCESSES)]
    ]


def _command(pid: int) -> Optional[str]:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None

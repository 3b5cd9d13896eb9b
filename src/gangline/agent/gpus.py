"""The NVIDIA cards of this host: by the library, else by nvidia-smi, else why there are none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Optional

from gangline.agent import gpu_tools
from gangline.agent.nvml import Library, NvmlError, cards
from gangline.agent.system import meminfo

KERNEL_MODULE = "/proc/driver/nvidia/version"


def gpus(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Cards, faults, versions, and the reason why there are none."""
    try:
        found = _by_library()
    except NvmlError as error:
        found = _nothing({"kind": error.kind, "text": str(error)})
        program = gpu_tools.path()
        if error.kind == "no-library" and program is not None:
            found = {**found, **gpu_tools.query(program), "source": "nvidia-smi"}
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
    try:
        with Path(place).open(encoding="utf-8", errors="replace") as stream:
            line = stream.readline()
    except OSError:
        return {"module": None, "open_module": None}
    version = re.search(r"\b\d{3}\.\d+(\.\d+)*\b", line)
    return {"module": version[0] if version else None, "open_module": "Open Kernel Module" in line}


def numa_node(pci: Any) -> Optional[int]:
    """The NUMA node of a PCI address; NVML writes its domain with eight digits, sysfs with four."""
    if not isinstance(pci, str):
        return None
    domain, _, rest = pci.partition(":")
    try:
        return int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def on_the_bus(root: Path) -> int:
    """How many NVIDIA display adapters the kernel sees, with or without a driver."""
    found = 0
    for device in root.glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found

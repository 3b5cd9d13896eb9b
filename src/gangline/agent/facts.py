"""Read-only facts about this host as one JSON document on stdout: `python -m gangline.agent.facts WORKDIR`.

Packages are looked up by their metadata, never imported: importing torch takes seconds and can fail.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "safetensors",
    "tokenizers",
    "numpy",
    "tensorboard",
    "nvidia-ml-py",
    "gangline",
)
"""Packages whose versions matter to a run."""


def facts(workdir: str) -> Dict[str, Any]:
    """Everything that is read, as plain data; sizes in bytes, null where it cannot be known."""
    total, available = _memory()
    gpus, gpu_reason = _gpus()
    return {
        "hostname": platform.node(),
        "num_cpus": _num_cpus(),
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "workdir": str(Path(workdir).resolve()),
        "disk_free_bytes": _disk_free(workdir),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": gpus,
        "gpu_reason": gpu_reason,
    }


def _num_cpus() -> int:
    """CPUs this process may use; a container or taskset often allows fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Tuple[Optional[int], Optional[int]]:
    """Total and available memory, from /proc/meminfo."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as stream:
            rows = dict(line.split(":", 1) for line in stream)
    except OSError:
        return None, None

    def read(key: str) -> Optional[int]:
        words = rows.get(key, "").split()
        return int(words[0]) * 1024 if words else None

    return read("MemTotal"), read("MemAvailable")


def _disk_free(workdir: str) -> int:
    """Free bytes where the work folder is, or will be."""
    folder = Path(workdir).resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _version(name: str) -> Optional[str]:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> Tuple[List[Dict[str, Any]], Optional[str]]:
    """The GPUs that NVML lists, or none and why."""
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], "NVML: " + str(error)
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return [_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())], None
    except pynvml.NVMLError as error:
        return [], "NVML: " + str(error)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, driver: str) -> Dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "index": index,
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "memory_total_bytes": int(memory.total),
        "memory_free_bytes": int(memory.free),
        "driver": driver,
    }


def _text(value: Any) -> str:
    """Old bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    json.dump(facts(sys.argv[1] if len(sys.argv) > 1 else "."), sys.stdout)
    sys.stdout.write("\n")

"""InfiniBand and RoCE, as sysfs shows them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

SYSFS = "/sys/class/infiniband"
PEER_MODULES = {"nvidia_peermem", "nv_peer_mem"}
NUM_PORTS = 64
NUM_GIDS = 16
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def rdma(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Every port of every adapter, and whether a program of ours may use them."""
    doors = sorted(Path("/dev/infiniband").glob("uverbs*"))
    return {
        "ports": ports(Path(SYSFS)),
        "peer_memory": bool(PEER_MODULES & _modules()),
        "may_open": all(os.access(door, os.R_OK | os.W_OK) for door in doors) if doors else None,
    }


def ports(root: Path) -> List[Dict[str, Any]]:
    """The ports below a folder like /sys/class/infiniband."""
    folders = sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], path.name.zfill(4)))
    return [_port(folder) for folder in folders[:NUM_PORTS]]


def _port(folder: Path) -> Dict[str, Any]:
    device = folder.parents[1]
    interfaces = sorted(path.name for path in device.glob("device/net/*"))
    return {
        "device": device.name,
        "port": int(folder.name) if folder.name.isdigit() else None,
        "state": _word(folder / "state"),
        "physical_state": _word(folder / "phys_state"),
        "link_layer": _text(folder / "link_layer"),
        "rate_gbps": _rate(_text(folder / "rate")),
        "interface": _text(folder / "gid_attrs/ndevs/0") or (interfaces[0] if interfaces else None),
        "gids": _gids(folder),
        "numa_node": _number(_text(device / "device/numa_node")),
    }


def _gids(folder: Path) -> List[str]:
    texts = [_text(path) for path in sorted(folder.glob("gids/*"), key=lambda path: path.name.zfill(4))[:256]]
    return [text for text in texts if text and text != NO_GID][:NUM_GIDS]


def _word(path: Path) -> Optional[str]:
    """The word of "4: ACTIVE"."""
    text = _text(path)
    return text.rpartition(":")[2].strip() if text else None


def _rate(text: Optional[str]) -> Optional[float]:
    """The number of "400 Gb/sec (4X NDR)"."""
    words = (text or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def _number(text: Optional[str]) -> Optional[int]:
    try:
        return int(text or "")
    except ValueError:
        return None


def _text(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()[:1024]
    except OSError:
        return None


def _modules() -> Set[str]:
    """Loaded modules by both lists: containers and hardened kernels often have one of them only."""
    text, folders = "", []
    with contextlib.suppress(OSError):
        text = Path("/proc/modules").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        folders = list(Path("/sys/module").iterdir())
    return {line.partition(" ")[0] for line in text.splitlines()} | {folder.name for folder in folders}

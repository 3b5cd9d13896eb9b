"""GPUs of other makers than NVIDIA, as the kernel shows them: no driver's library and no torch is asked.

Which of them count as cards, and which are the graphics of a processor, is for the controller to say.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from gangline.agent.bounded import run
from gangline.agent.host_files import read_number, read_text

MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}
DISPLAY, ACCELERATOR, ENCRYPTION = "0x03", "0x1200", "0x1080"
"""The first digits of a PCI device's class: display adapters, MI200 and later, and the security processor that every
AMD processor with graphics has beside them, in the same slot.
"""
DEVICES = Path("/sys/bus/pci/devices")
MARKETING_NAMES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
PCI_NAMES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids", "usr/share/pci.ids")


def other_gpus(_request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The GPUs of this host that are not NVIDIA's."""
    if platform.system() == "Darwin":
        return _apple()
    return on_the_bus(DEVICES, Path("/"))


def on_the_bus(devices: Path, root: Path) -> List[Dict[str, Any]]:
    """AMD's and Intel's display adapters and accelerators; `root`: where lists of names are looked for."""
    return [_device(device, root) for device in sorted(devices.glob("*")) if _counts(device)]


def _counts(device: Path) -> bool:
    maker, kind = read_text(device / "vendor") or "", read_text(device / "class") or ""
    return maker in MAKERS and (kind.startswith(DISPLAY) or (maker == "0x1002" and kind.startswith(ACCELERATOR)))


def _device(device: Path, root: Path) -> Dict[str, Any]:
    maker = MAKERS[read_text(device / "vendor") or ""]
    number = (read_text(device / "device") or "").replace("0x", "").lower()
    return {
        "maker": maker,
        "name": _name(device, maker, number, root),
        "pci": device.name,
        "memory_bytes": read_number(device / "mem_info_vram_total"),
        "integrated": device.name.startswith("0000:00:") if maker == "Intel" else _beside_a_processor(device),
    }


def _beside_a_processor(device: Path) -> bool:
    """Whether the slot has the security processor of an AMD processor: graphics of its own have none."""
    slot = device.name.rpartition(".")[0]
    classes = (read_text(other / "class") or "" for other in device.parent.glob(slot + ".*"))
    return any(kind.startswith(ENCRYPTION) for kind in classes)


def _name(device: Path, maker: str, number: str, root: Path) -> str:
    """The card's own word, else what the lists of libdrm and of PCI devices have, else its number."""
    if said := read_text(device / "product_name"):
        return said
    revision = (read_text(device / "revision") or "").replace("0x", "").lower()
    for place in MARKETING_NAMES if maker == "AMD" else ():
        for line in _lines(root / place):
            fields = [field.strip() for field in line.split(",", 2)]
            if len(fields) == 3 and (fields[0].lower(), fields[1].lower()) == (number, revision):
                return fields[2]
    for place in PCI_NAMES:
        if found := _pci_name(_lines(root / place), (read_text(device / "vendor") or "")[2:], number):
            return maker + " " + found
    return maker + " GPU " + number


def _pci_name(lines: Iterator[str], vendor: str, number: str) -> Optional[str]:
    """The name behind a number in pci.ids; of "Navi 31 [Radeon RX 7900 XTX]" what people know, in the brackets."""
    ours = False
    for line in lines:
        if line[:1] not in {"\t", "#", ""}:
            ours = line.lower().startswith(vendor)
        elif ours and re.match(r"\t[0-9a-f]", line) and line[1:5].lower() == number:
            name = line[5:].strip()
            known = re.search(r"\[(.+)\]", name)
            return known[1] if known else name
    return None


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    except OSError:
        return


def _apple() -> List[Dict[str, Any]]:
    """The GPU of a Mac with Apple's chip, which is one with its processor and its memory."""
    name = run(["sysctl", "-n", "machdep.cpu.brand_string"]).stdout.strip()
    if not name.startswith("Apple"):
        return []
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [{"maker": "Apple", "name": name, "pci": None, "memory_bytes": pages, "integrated": True}]

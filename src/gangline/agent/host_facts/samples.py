"""One look at what a host does right now: figures by name, rates since the look before.

    sample < {"before": counters of the last answer, or null}: {"figures", "counters", "cards"}

Names have their unit at the end: `cpu_percent`, `net/eth0/rx_bytes_per_s`, `gpu/0/temperature_c`. A figure that the
host does not tell is missing. Costs some milliseconds; standard library only, Python >= 3.8.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gangline.agent.host_facts import nvidia
from gangline.agent.host_files import read_number, read_text

Figures = Dict[str, float]

SECTOR_BYTES = 512
KIB = 1024
MOST_INTERFACES = 8
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
"""Block devices that are none, or stand for others that are counted already."""
PRESSURES = ("cpu", "memory", "io")
SM_CLOCK = 1


class HostReader:
    """Reads one host; `root` is where its /proc and /sys lie. Keep it: rates are those since its last look."""

    def __init__(self, root: Path = Path("/"), *, before: Optional[Dict[str, float]] = None) -> None:
        self._root = root
        self.counters: Dict[str, float] = dict(before or {})

    def figures(self) -> Figures:
        """Figures now, and rates since the last call; without one, no rates."""
        now = dict(self._counters(), seconds=time.monotonic())
        before, self.counters = self.counters, now
        elapsed_s = now["seconds"] - before.get("seconds", now["seconds"])
        found = self._memory()
        if elapsed_s <= 0:
            return found
        rates = {name: (now[name] - before[name]) for name in now if now[name] >= before.get(name, float("inf"))}
        whole = rates.pop("cpu_ticks", 0.0)
        if whole:
            found["cpu_percent"] = 100.0 * (1.0 - rates.pop("cpu_idle_ticks", 0.0) / whole)
        for name, change in rates.items():
            if name.endswith("_bytes"):
                found[name + "_per_s"] = change / elapsed_s
            elif name.startswith("pressure/"):
                found[name] = min(100.0, change / 1e4 / elapsed_s)  # microseconds: per cent of the time
        return found

    def _counters(self) -> Dict[str, float]:
        found: Dict[str, float] = {}
        for line in self._lines("proc/stat")[:1]:
            ticks = [int(word) for word in line.split()[1:9]]
            found["cpu_ticks"], found["cpu_idle_ticks"] = sum(ticks), sum(ticks[3:5])
        for name in PRESSURES:
            for line in self._lines("proc/pressure/" + name)[:1]:
                found["pressure/{}_percent".format(name)] = int(line.rpartition("=")[2])
        for fields in (line.split() for line in self._lines("proc/diskstats")):
            if len(fields) > 9 and self._is_disk(fields[2]):
                for name, number in (("read", fields[5]), ("write", fields[9])):
                    key = "disk/{}_bytes".format(name)
                    found[key] = found.get(key, 0) + int(number) * SECTOR_BYTES
        found.update(self._network())
        return found

    def _network(self) -> Dict[str, float]:
        """Bytes of the interfaces with the most traffic since boot; without those that never had any."""
        rows: List[Tuple[str, int, int]] = []
        for line in self._lines("proc/net/dev")[2:]:
            name, _, rest = line.partition(":")
            fields = rest.split()
            if len(fields) >= 9 and int(fields[0]) + int(fields[8]):
                rows.append((name.strip(), int(fields[0]), int(fields[8])))
        rows.sort(key=lambda row: -row[1] - row[2])
        found: Dict[str, float] = {}
        for name, received, sent in rows[:MOST_INTERFACES]:
            found["net/{}/rx_bytes".format(name)], found["net/{}/tx_bytes".format(name)] = received, sent
        return found

    def _is_disk(self, name: str) -> bool:
        return not name.startswith(NO_DISKS) and (self._root / "sys/block" / name).exists()

    def _memory(self) -> Figures:
        rows = {}
        for line in self._lines("proc/meminfo"):
            name, _, rest = line.partition(":")
            rows[name] = int(rest.split()[0]) * KIB
        found: Figures = {}
        if "MemAvailable" in rows:
            found["memory_bytes"] = rows["MemTotal"] - rows["MemAvailable"]
            found["memory_percent"] = 100.0 * found["memory_bytes"] / rows["MemTotal"]
        if rows.get("SwapTotal"):
            found["swap_bytes"] = rows["SwapTotal"] - rows["SwapFree"]
        return found

    def _lines(self, name: str) -> List[str]:
        return (read_text(self._root / name) or "").splitlines()


class CardReader:
    """Reads the GPUs of this host: NVIDIA's by its library, AMD's from the kernel.

    uuids: NVIDIA's that are wanted; empty: all.
    """

    def __init__(self, uuids: Tuple[str, ...] = (), *, root: Path = Path("/")) -> None:
        self._library: Optional[nvidia.Library] = None
        self._nvidia: List[Tuple[int, ctypes.c_void_p]] = []
        self.cards: List[Dict[str, Any]] = []
        """Index, name and whether it is a stand-in for tests, of every card that is read."""
        self.processes: Dict[int, List[int]] = {}
        """Index of a card -> who computed on it at the last look; NVIDIA only."""
        self.throttle: Dict[int, List[str]] = {}
        """Index of a card -> why its clocks were lower at the last look, other than for its power limit."""
        try:
            self._library = nvidia.Library()
            self._find(self._library, uuids)
        except nvidia.NvmlError:
            pass
        self._amd = dict(enumerate(_amd_devices(root), len(self._nvidia)))
        self.cards += [{"index": index, "name": "AMD GPU", "simulated": False} for index in self._amd]

    def _find(self, library: nvidia.Library, uuids: Tuple[str, ...]) -> None:
        for index in range(library.number("nvmlDeviceGetCount_v2") or 0):
            device = ctypes.c_void_p()
            try:
                if not library.answers("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
                    continue
                uuid, name = (library.text("nvmlDeviceGet" + what, device) for what in ("UUID", "Name"))
            except nvidia.NvmlError:  # it is lost
                continue
            if not uuids or uuid in uuids:
                self._nvidia.append((index, device))
                self.cards.append({"index": index, "name": name, "uuid": uuid, "simulated": library.is_simulated})

    def figures(self) -> Figures:
        """Figures of all cards; those of a card that is lost are missing."""
        found: Figures = {}
        for index, device in self._nvidia:
            try:
                assert self._library is not None
                values = self._of_nvidia(self._library, index, device)
            except nvidia.NvmlError:
                values = {"lost": 1.0}
            found.update(("gpu/{}/{}".format(index, name), value) for name, value in values.items())
        for index, place in self._amd.items():
            values = amd_figures(place)
            found.update(("gpu/{}/{}".format(index, name), value) for name, value in values.items())
        return found

    def _of_nvidia(self, library: nvidia.Library, index: int, device: ctypes.c_void_p) -> Figures:
        card = nvidia.moment(library, device)
        clock = library.number("nvmlDeviceGetClockInfo", device, ctypes.c_uint(SM_CLOCK))
        self.processes[index] = [row["pid"] for row in card["processes"]]
        self.throttle[index] = [words for words in card["throttle"] if words != nvidia.POWER_CAP]
        total, free = card["memory_total_bytes"], card["memory_free_bytes"]
        told = {
            "utilization_percent": card["utilization_percent"],
            "memory_bytes": None if total is None else total - free,
            "memory_percent": 100.0 * (total - free) / total if total else None,
            "power_w": card["power_w"],
            "temperature_c": card["temperature_c"],
            "clock_mhz": clock,
            "throttled_percent": 100.0 * bool(self.throttle[index]),
            "at_power_limit_percent": 100.0 * (nvidia.POWER_CAP in card["throttle"]),
            "ecc_uncorrected": card["ecc_uncorrected"],
        }
        return {name: float(value) for name, value in told.items() if value is not None}


def _amd_devices(root: Path) -> Iterator[Path]:
    for place in sorted((root / "sys/class/drm").glob("card*/device")):
        if read_text(place / "vendor") == "0x1002" and (place / "gpu_busy_percent").exists():
            yield place


AMD = {
    "utilization_percent": ("gpu_busy_percent", 1.0),
    "memory_bytes": ("mem_info_vram_used", 1.0),
    "power_w": ("hwmon/hwmon*/power1_average", 1e-6),
    "temperature_c": ("hwmon/hwmon*/temp1_input", 1e-3),
    "clock_mhz": ("hwmon/hwmon*/freq1_input", 1e-6),
}
"""Our name -> the file of the kernel's driver, and the factor to our unit."""


def amd_figures(place: Path) -> Figures:
    """Figures of an AMD card, by its folder in /sys."""
    found: Figures = {}
    for name, (pattern, factor) in AMD.items():
        numbers = [read_number(path) for path in sorted(place.glob(pattern))]
        if numbers and numbers[0] is not None:
            found[name] = numbers[0] * factor
    total = read_number(place / "mem_info_vram_total")
    if total and "memory_bytes" in found:
        found["memory_percent"] = 100.0 * found["memory_bytes"] / total
    return found


def sample(asked: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    host, cards = HostReader(before=asked.get("before")), CardReader()
    figures = {**host.figures(), **cards.figures()}
    return {"kind": "result", "figures": figures, "counters": host.counters, "cards": cards.cards}

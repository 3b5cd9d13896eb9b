"""nvidia-smi: what it says where the library cannot be asked, and how the cards are joined."""

from __future__ import annotations

import csv
import shutil
from typing import Any, Dict, List, Optional

from gangline.agent.bounded import Output, run

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

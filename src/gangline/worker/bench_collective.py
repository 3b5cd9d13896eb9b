"""`bench-collective`: all-reduce at a few sizes, under torchrun. Rank 0 writes a JSON line for each.

    python -m gangline.worker bench-collective '{"backend": "gloo", "sizes": [bytes, ...], "seconds": 10, "start_s": 90,
                                                 "deadline_s": 120}'

Every rank ends by itself at its deadline, wherever it hangs. What is done next is agreed by all ranks: the slowest
decides how often and how large.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gangline.worker.process_group import leave

ITERATIONS_LEAST, ITERATIONS_MOST = 3, 50
NEEDED = 4
"""Times the size of a tensor: itself, its copy, and what gloo and NCCL take."""


def bench_main(argv: list[str]) -> int:
    """Entry point; does not return once the ranks have met."""
    order = json.loads(argv[0])
    # No handler: the kernel ends the process, also where it hangs in a collective.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(1, round(order["deadline_s"])))
    device = _device(order["backend"])
    dist.init_process_group(order["backend"], timeout=timedelta(seconds=order["start_s"]))
    run(order, device)
    leave(0)


def run(order: dict[str, Any], device: torch.device) -> None:
    """All sizes, smallest first, as long as there is time."""
    begun, one_s = time.monotonic(), 0.0
    sizes = sorted(order["sizes"])
    for number, size in enumerate(sizes):
        growth = size / sizes[number - 1] if number else 1.0
        left_s = order["seconds"] - _slowest(time.monotonic() - begun)
        share_s = left_s / (len(sizes) - number)
        if number and one_s * growth * (ITERATIONS_LEAST + 1) > left_s:
            _tell({"kind": "skipped", "num_bytes": size, "why": f"{left_s:.1f} s were left"})
            return
        if _least(free_bytes(device)) < NEEDED * size:
            _tell({"kind": "skipped", "num_bytes": size, "why": "too little free memory"})
            return
        times = measure(size, device, share_s)
        one_s = times[len(times) // 2]
        _tell(
            {
                "kind": "collective",
                "operation": "all_reduce",
                "num_bytes": size,
                "seconds": one_s,
                "iterations": len(times),
                "world_size": dist.get_world_size(),
            }
        )


def measure(size: int, device: torch.device, share_s: float) -> list[float]:
    """Seconds of the slowest rank in each iteration, sorted; as many as fit into `share_s`."""
    tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)
    _once(tensor)  # connections, buffers, the first touch of the memory
    first_s = _slowest(_once(tensor))
    iterations = max(ITERATIONS_LEAST, min(ITERATIONS_MOST, int(share_s / max(first_s, 1e-6)) - 2))
    times = torch.tensor([_once(tensor) for _ in range(iterations)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return sorted(times.tolist())


def free_bytes(device: torch.device) -> int:
    """Memory that a rank may take; on the CPU, its part of what the host has available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(rows["MemAvailable"].split()[0]) * 1024
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _once(tensor: torch.Tensor) -> float:
    tensor.fill_(1.0)
    _settle(tensor.device)
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    _settle(tensor.device)
    return time.perf_counter() - begun


def _settle(device: torch.device) -> None:
    """Wait until the device has done its work: it is asked for, not done, when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(value: float) -> float:
    return _agreed(value, dist.ReduceOp.MAX)


def _least(value: float) -> float:
    return _agreed(value, dist.ReduceOp.MIN)


def _agreed(value: float, how: Any) -> float:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=how)
    return float(shared.item())


def _device(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _tell(record: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()

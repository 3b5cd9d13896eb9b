"""`bench-collective`: all-reduce at a few sizes, under torchrun. Rank 0 writes a JSON line for each.

    python -m gangline.worker bench-collective '{"backend": "gloo", "sizes": [bytes, ...], "seconds": 10, "start_s": 90,
                                                 "deadline_s": 120}'

Every rank ends by itself at its deadline, wherever it hangs. All ranks agree on the next measurement: the slowest
decides how often and how large. `calibrate` and `bench-scaling` share the parts of a measurement below.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from gangline.worker.json_lines import write_line
from gangline.worker.process_group import leave

ITERATIONS_LEAST, ITERATIONS_MOST = 3, 50
NEEDED = 4
"""Times the size of a tensor: itself, its copy, and what gloo and NCCL take."""


def bench_main(argv: list[str]) -> int:
    """Entry point; does not return once the ranks have met."""
    order = read_order(argv)
    device = rank_device() if order["backend"] == "nccl" else torch.device("cpu")
    dist.init_process_group(order["backend"], timeout=timedelta(seconds=order["start_s"]))
    run(order, device)
    leave(0)


def run(order: dict[str, Any], device: torch.device) -> None:
    """All sizes, smallest first, as long as there is time."""
    begun, one_s = time.monotonic(), 0.0
    sizes = sorted(order["sizes"])
    for number, size in enumerate(sizes):
        growth = size / sizes[number - 1] if number else 1.0
        left_s = order["seconds"] - most(time.monotonic() - begun)
        why = ""
        if number and one_s * growth * (ITERATIONS_LEAST + 1) > left_s:
            why = f"{left_s:.1f} s were left"
        elif least(free_bytes(device)) < NEEDED * size:
            why = "too little free memory"
        if why:
            _report_once("skipped", num_bytes=size, why=why)
            return
        times = measure(size, device, left_s / (len(sizes) - number))
        one_s = median_high(times)
        _report_once(
            "collective",
            operation="all_reduce",
            num_bytes=size,
            seconds=one_s,
            iterations=len(times),
            world_size=dist.get_world_size(),
        )


def measure(size: int, device: torch.device, share_s: float) -> list[float]:
    """Seconds of the slowest rank in each iteration, sorted; as many as fit into `share_s`."""
    tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)

    def once() -> float:
        tensor.fill_(1.0)
        return timed(device, lambda: dist.all_reduce(tensor))

    once()  # connections, buffers, the first touch of the memory
    first_s = most(once())
    iterations = max(ITERATIONS_LEAST, min(ITERATIONS_MOST, int(share_s / max(first_s, 1e-6)) - 2))
    times = torch.tensor([once() for _ in range(iterations)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return sorted(times.tolist())


def _report_once(kind: str, **figures: Any) -> None:
    if dist.get_rank() == 0:
        report(kind, **figures)


# The parts of every measurement.


def read_order(argv: list[str]) -> dict[str, Any]:
    """The order on the command line; from now on the kernel ends this process at the order's deadline."""
    order: dict[str, Any] = json.loads(argv[0])
    # no handler: it must end also where it hangs in a collective
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(1, round(order["deadline_s"])))
    return order


def rank_device() -> torch.device:
    """The GPU of this rank, or the CPU of a host without one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that a rank may take; on the CPU, its part of the memory that the host has available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return proc_bytes(Path("/proc/meminfo"), "MemAvailable") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def proc_bytes(path: Path, name: str) -> int:
    """A size in a file of /proc that has one per line, in kB."""
    rows = dict(line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines())
    return int(rows[name].split()[0]) * 1024


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds until the device has done it: a call returns when work is queued."""
    settle(device)
    begun = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - begun


def settle(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def most(value: float) -> float:
    """The largest over all ranks, which wait for each other here."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.item())


def least(value: float) -> float:
    """The smallest over all ranks."""
    return -most(-value)


def report(kind: str, **figures: Any) -> None:
    """Write a line of this rank."""
    write_line(kind, **{"rank": dist.get_rank(), **figures})

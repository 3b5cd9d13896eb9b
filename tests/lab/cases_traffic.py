"""What a rank does in test_traffic: collectives over gloo, and the bytes that its host's network card sent for them."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMES = 3


def main() -> None:
    """One JSON line: operation, bytes of the buffer, bytes sent for one of them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    numbers = int(sys.argv[1]) // 4 // dist.get_world_size() * dist.get_world_size()
    whole, part = torch.ones(numbers), torch.ones(numbers // dist.get_world_size())
    operations = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": lambda: dist.send(whole, 1) if dist.get_rank() == 0 else dist.get_rank() == 1 and dist.recv(whole, 0),
    }
    found = {}
    for name, once in operations.items():
        once()  # connections
        quiet()
        before = sent_bytes()
        for _ in range(TIMES):
            once()
        quiet()
        found[name] = (sent_bytes() - before) / TIMES
    sys.stdout.write(json.dumps({"num_bytes": numbers * 4, "sent": found}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down may hang


def quiet() -> None:
    """All have arrived, and nothing is on its way: the counter stands still."""
    dist.barrier()
    before, ends = -1, time.monotonic() + 10
    while before != (before := sent_bytes()) and time.monotonic() < ends:
        time.sleep(0.1)


def sent_bytes() -> int:
    """By the network card since it is there."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()

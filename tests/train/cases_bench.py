"""What the ranks do in test_bench_collective."""

import contextlib
import io
import json
import os
import signal

import torch

from gangline.worker import bench_collective


def measured(sizes: list[int], seconds: float, free: int | None = None):
    """The lines that this rank writes."""
    if free is not None:
        bench_collective.free_bytes = lambda _: free
    with contextlib.redirect_stdout(io.StringIO()) as text:
        bench_collective.run({"sizes": sizes, "seconds": seconds}, torch.device("cpu"))
    return [json.loads(line) for line in text.getvalue().splitlines()]


def wait_for_nobody():
    """Be one of two ranks whose other never comes."""
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    order = {"backend": "gloo", "sizes": [4096], "seconds": 1, "start_s": 600, "deadline_s": 1}
    bench_collective.bench_main([json.dumps(order)])

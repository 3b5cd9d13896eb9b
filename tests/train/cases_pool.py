"""What the ranks do in test_pool."""

import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def rank_and_sum(start: float):
    value = torch.tensor([start + dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(value)
    return [dist.get_rank(), dist.get_world_size(), value.item(), os.getpid()]


def gradient():
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    return model.module.weight.grad.tolist()


def fail_on(rank: int):
    if dist.get_rank() == rank:
        raise ValueError("the flour is damp")
    dist.barrier()


def die_on(rank: int):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever():
    threading.Event().wait()


def die_by(number: int):
    os.kill(os.getpid(), number)


def double(value):
    return 2 * value


def draw():
    value = torch.rand(1).item()
    torch.set_default_dtype(torch.float64)
    return value


def group_and_threads():
    group = dist.new_group(list(range(dist.get_world_size())))
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return [value.item(), len(list(Path("/proc/self/task").iterdir()))]

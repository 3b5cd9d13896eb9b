"""What test_script_hooks asks of ranks that have torch."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from gangline import hooks


def stopped(*, asked: list[int]) -> list[bool]:
    """Whether this rank is to stop, before and after some ranks had SIGTERM."""
    before = hooks.should_stop()
    if dist.get_rank() in asked:
        os.kill(os.getpid(), signal.SIGTERM)
    return [before, hooks.should_stop()]


def saved(*, saves: list[int], stops: list[int]) -> list[list[bool]]:
    """What this rank is told after each of four steps, (save, stop): some ranks have SIGUSR1 before the second step, and
    some SIGTERM between the two questions after the third.
    """
    told = []
    for step in range(4):
        if step == 1 and dist.get_rank() in saves:
            os.kill(os.getpid(), signal.SIGUSR1)
        save = hooks.save_now()
        if step == 2 and dist.get_rank() in stops:
            os.kill(os.getpid(), signal.SIGTERM)
        told.append([save, hooks.should_stop()])
    return told

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

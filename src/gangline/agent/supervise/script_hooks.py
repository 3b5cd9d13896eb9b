"""For scripts of your own under `gangline run`: progress by step, and an end in good order.

    from gangline import hooks

    for step in range(1, steps + 1):
        loss = train(...)
        hooks.step(step, steps=steps, loss=loss, tokens=tokens)
        if hooks.save_now():
            save(...)
        if hooks.should_stop():
            break

Elsewhere, as under plain torchrun, `step` does nothing, and the others know of signals to its own ranks. It needs
nothing but Python; gangline brings this file to hosts whose environment has no gangline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

FOLDER = "GANGLINE_RANK_FILES"
"""Where ranks leave files for their host agent; not set elsewhere."""
METRICS = "metrics.jsonl"
"""As in `runs.layout`, which is not there."""
SAVE_ORDER = "save.json"
"""As in `runs.layout`."""
SAVES = "rank-0.saves"
"""A file that says that the script asks for orders to save."""
FROM_0 = "steps-from-0"
"""A file in the folder of a run whose script counts its steps from 0."""


class _Script:
    """What is known of this rank."""

    stop_asked = False
    save_asked = False
    listens = False
    saves = False
    """It asks `save_now`, which then is where ranks agree on a stop, too."""
    stop_agreed = False
    last_at: Optional[float] = None
    """When the last step was reported, in seconds."""
    first: Optional[int] = None
    """The number of the run's first step, 0 or 1; None: not known yet."""


def step(
    number: int,
    *,
    steps: Optional[int] = None,
    loss: Any = None,
    tokens: Optional[int] = None,
    learning_rate: Optional[float] = None,
) -> None:
    """Report that an optimizer step is done, on every rank.

    number: from 1 or from 0; figures count from 1. steps: all of them. loss: a number, or a tensor with one. tokens:
    that all ranks together have trained in this step. The figures are those of rank 0.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "0")
    if not folder:
        return
    before, _Script.last_at = _Script.last_at, time.monotonic()
    try:
        Path(folder, f"rank-{rank}.step").write_text(f"{number}\n", encoding="ascii")
        if rank == "0":
            step_s = None if before is None else _Script.last_at - before
            rate = tokens / step_s if tokens is not None and step_s else None
            done = number + 1 - _first(number, Path(folder).parents[1])
            figures = {"step": done, "steps": steps, "loss": None if loss is None else float(loss)}
            figures.update(learning_rate=learning_rate, tokens_per_s=rate, step_s=step_s)
            line = {"kind": "step", "time": datetime.now(timezone.utc).isoformat(), **figures}
            with Path(folder).parents[1].joinpath(METRICS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
    except OSError:  # a full disk does not end the training
        pass


def _first(number: int, run: Path) -> int:
    """0 if the script counts its steps from 0, else 1.

    A resumed script begins in the middle, so a file in the folder of the run remembers it.
    """
    if _Script.first is None:
        mark = run / FROM_0
        if number == 0:
            mark.touch()
        _Script.first = 0 if mark.exists() else 1
    return _Script.first


def should_stop() -> bool:
    """Whether the run is to end now, the same on every rank; to be called by all of them after each step.

    True once any rank has had SIGTERM, as from `gangline stop`: save and leave. Costs an exchange of one number where
    torch.distributed is in use. Call it on the main thread.
    """
    _listen()
    if _Script.saves:
        return _Script.stop_agreed
    return _largest(int(_Script.stop_asked)) > 0


def save_now() -> bool:
    """Whether to save now, the same on every rank; to be called by all of them after each step, before `should_stop`.

    True once after `gangline save` or SIGUSR1 to any rank, and once before `should_stop` is true. Costs an exchange of
    one number where torch.distributed is in use; that of `should_stop` is none then. Call it on the main thread.
    """
    _listen()
    if not _Script.saves:
        _Script.saves = True
        signal.signal(signal.SIGUSR1, _note)
        _tell_saves()
    asked, _Script.save_asked = _Script.save_asked or _take_order(), False
    wanted = _largest(2 if _Script.stop_asked else int(asked))
    is_new = wanted > 0 and not _Script.stop_agreed
    _Script.stop_agreed = _Script.stop_agreed or wanted > 1
    return is_new


def _of_rank_0(name: str) -> Optional[Path]:
    """A file of the attempt on the head; None on other ranks, and where gangline has not started this one."""
    folder = os.environ.get(FOLDER)
    return Path(folder, name) if folder and os.environ.get("RANK", "0") == "0" else None


def _tell_saves() -> None:
    """`gangline save` refuses scripts that have not said so."""
    mark = _of_rank_0(SAVES)
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def _take_order() -> bool:
    """Whether rank 0 finds an order of `gangline save`, which it takes away."""
    order = _of_rank_0(SAVE_ORDER)
    if order is None:
        return False
    try:
        order.unlink()
    except OSError:
        return False
    return True


def _listen() -> None:
    if not _Script.listens:
        _Script.listens = True
        signal.signal(signal.SIGTERM, _note)


def _note(number: int, _frame: Any) -> None:
    if number == signal.SIGTERM:
        _Script.stop_asked = True
    else:
        _Script.save_asked = True


def _largest(number: int) -> int:
    """The largest that any rank has."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return number
    on_gpu = torch.distributed.get_backend() == "nccl"
    shared = torch.tensor(number, device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared.item())

"""What a rank does when the bench says so: hang in one of three ways, or take long; each host's Python has it as its
sitecustomize.

`hangs_world.py` puts it there, and writes orders: files in this one's folder. What the trainer calls in a phase is
replaced in the rank by something that looks for its order first, takes it away, says what it does, and does it:

    data         asleep, waiting for rows that nobody brings (reading a micro-batch)
    busy         a loop of arithmetic that never ends (forward)
    native       a C library waits for a lock that it holds itself, with the interpreter's lock held (in backward, where
                 gradients are handed to the exchange)
    evaluation   one micro-batch of an evaluation takes so many seconds
    evaluations  every micro-batch of an evaluation takes PIECE_S, until it was so many seconds together
    save         the first file that is saved takes so many seconds to get to the disk
    pace         not taken away: every forward pass takes so many seconds longer, asleep

The bench itself never imports this.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PIECE_S = 5.0
LOCK_BYTES = 128
"""More than a mutex has on any machine."""

left_s = 0.0
"""Of `evaluations`."""


def wait_for_rows() -> None:
    """As a data loader whose workers are gone."""
    rows = threading.Event()
    rows.wait()


def compute_for_ever() -> None:
    """As a search that does not end."""
    total = 0.0
    while True:
        total = (total * 1.000001 + 1.0) % 1e9


def wait_for_lock() -> None:
    """As a C library that locks itself out, called without giving Python's lock away."""
    native, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(LOCK_BYTES)
    native.pthread_mutex_lock(lock)
    native.pthread_mutex_lock(lock)


def taken(kind: str) -> str | None:
    """What an order says, if there is one; it is this rank's then."""
    try:
        text = (FOLDER / kind).read_text(encoding="ascii")
        if not text.endswith("\n"):  # not whole yet
            return None
        (FOLDER / kind).unlink()
    except OSError:
        return None
    return text.strip()


def say(name: str, **words: object) -> None:
    """Tell the bench. `at`: by the clock that all processes of one machine have in common."""
    told = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "at": time.monotonic(), **words}
    scratch = FOLDER / f"{name}.new"
    scratch.write_text(json.dumps(told), encoding="ascii")
    scratch.replace(FOLDER / f"{name}.json")


def hanging(kind: str, hang: Callable[[], None]) -> Callable[[], None]:
    """What looks for that order."""
    code = hang.__code__
    lines = [line for _, _, line in code.co_lines() if line is not None]

    def look() -> None:
        if taken(kind) is not None:
            say("began", function=code.co_name, file=Path(code.co_filename).name, lines=[min(lines), max(lines)])
            hang()

    return look


def slowly(kind: str) -> None:
    """Take as long as an order says, once."""
    seconds = taken(kind)
    if seconds is not None:
        say("began", kind=kind)
        time.sleep(float(seconds))
        say("ended", kind=kind)


def evaluate_slowly() -> None:
    """Before a micro-batch of an evaluation."""
    global left_s  # noqa: PLW0603
    slowly("evaluation")
    seconds = taken("evaluations")
    if seconds is not None:
        left_s = float(seconds)
        say("began", kind="evaluations")
    if left_s > 0:
        time.sleep(PIECE_S)
        left_s -= PIECE_S
        if left_s <= 0:
            say("ended", kind="evaluations")


def put(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Have something done before a function is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def instead(*words: Any, **named: Any) -> Any:
        first()
        return original(*words, **named)

    setattr(owner, name, instead)


def lay() -> None:
    """In a rank that was just forked from a process that has imported the trainer."""
    from gangline.strategies.ddp import train as ddp
    from gangline.worker import checkpoint, loop, record
    from gangline.worker.loss import CausalLoss

    put(loop, "pick", hanging("data", wait_for_rows))
    put(CausalLoss, "forward", hanging("busy", compute_for_ever))
    put(ddp._Exchange, "send", hanging("native", wait_for_lock))
    put(record, "pick", evaluate_slowly)
    put(checkpoint, "sync_folder", functools.partial(slowly, "save"))
    try:
        pace_s = float((FOLDER / "pace").read_text(encoding="ascii"))
    except OSError:
        return
    put(CausalLoss, "forward", functools.partial(time.sleep, pace_s))


if "prefork" in sys.orig_argv:
    os.register_at_fork(after_in_child=lay)

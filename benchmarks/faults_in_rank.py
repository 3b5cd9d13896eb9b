"""What goes wrong inside a rank when the bench says so; each host's Python has it as its sitecustomize.

`faults_planted.py` puts it there, and writes one word to ORDER, which the rank on that host takes away:

    nan         the numbers of one forward pass are none
    nan-stays   one weight of this replica is no number from now on
    flip        one weight of this replica is another number from now on
    exception   the forward pass raises ValueError
    memory      this process takes more and more memory until somebody ends it

Nothing of gangline is touched: torch's own hooks do it. Where the bench imports this, nothing happens.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDER = "/var/tmp/plug/order"
LOOK_S = 0.02
PIECE_BYTES = 64 << 20
MOST_BYTES = 6 << 30
"""More than the limit that the bench puts on a host; where none bites, the machine is spared."""
PLANTED = "planted by the bench"

held: list[bytes] = []


def obey() -> None:
    """Wait for orders, as long as this process lives."""
    place = Path(ORDER)
    while True:
        time.sleep(LOOK_S)
        try:
            word = place.read_text(encoding="ascii").strip()
            place.unlink()
        except OSError:
            continue
        if word == "memory":
            grow()
        elif word:
            HOOKS[word]()


def grow() -> None:
    """Take memory, and write to it."""
    while len(held) * PIECE_BYTES < MOST_BYTES:
        held.append(b"\x01" * PIECE_BYTES)
        time.sleep(0.01)


def hooked(act: Callable[[Any, Any], tuple[bool, Any]]) -> None:
    """At the next forward pass of a linear layer that is trained, once. act: of the layer and what it gave; whether it
    was done, and what it gives instead.
    """
    import torch

    done = False

    def after(layer: Any, _inputs: Any, output: Any) -> Any:
        nonlocal done
        if done or not isinstance(layer, torch.nn.Linear) or not output.requires_grad:
            return None
        done, instead = act(layer, output)
        return instead

    torch.nn.modules.module.register_module_forward_hook(after)


def nan() -> None:
    """Of one forward pass."""
    hooked(lambda _layer, output: (True, output * float("nan")))


def weight(value: float) -> Callable[[], None]:
    """Put a value into the first weight of a layer."""

    def change(layer: Any, _output: Any) -> tuple[bool, Any]:
        if not layer.weight.requires_grad:
            return False, None
        layer.weight.data[0, 0] = value
        return True, None

    return lambda: hooked(change)


def exception() -> None:
    """As a mistake in somebody's code, or in a row of the data."""

    def fail(_layer: Any, _output: Any) -> tuple[bool, Any]:
        raise ValueError(PLANTED)

    hooked(fail)


HOOKS: dict[str, Callable[[], None]] = {
    "nan": nan,
    "nan-stays": weight(float("nan")),
    "flip": weight(3.0),
    "exception": exception,
}


def begin() -> None:
    """In a rank."""
    threading.Thread(target=obey, name="planted", daemon=True).start()


# after threading's own: it forgets all threads but the one that forked
if "prefork" in sys.orig_argv:
    os.register_at_fork(after_in_child=begin)
elif "RANK" in os.environ and any(word.endswith("faults_plain.py") for word in sys.orig_argv):
    begin()

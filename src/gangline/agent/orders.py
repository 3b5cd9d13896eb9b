"""Orders to a guard, and who may give them.

Who gives orders has an epoch, and writes order-<epoch>.json into the guard's folder: {"epoch": n, "order": one of
these or null}. null only announces who is in charge from now on. The highest epoch seen counts; what a lower one orders
is refused: it comes from a supervisor that slept while another one took over.

    yield  ranks save at the next step and leave; the guard rests
    break  the gang has failed elsewhere: ranks cut their connections, save the last step that is complete if they can,
           and leave; the guard rests
    stop   ranks save at the next step and leave; nothing stays
    kill   everything is ended at once
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Callable, Dict, Optional, Set, Tuple

ORDER_FILE = re.compile(r"order-(\d{1,9})\.json")
STRENGTH = ("yield", "break", "stop", "kill")
"""A later one takes the place of an earlier one, and never the other way round."""


class Orders:
    """What the guard of a folder was ordered.

    epoch: of who started the guard. complain: told once of each order that is refused.
    """

    def __init__(self, folder: Path, *, epoch: int, complain: Callable[[str], None]) -> None:
        self.epoch = epoch
        self._folder = folder
        self._complain = complain
        self._seen: Set[Tuple[int, str]] = set()
        """Orders that were valid when they were seen, or have been refused."""

    def read(self) -> Optional[str]:
        """The order that counts now; None if there is none."""
        given = self._given()
        self.epoch = max([self.epoch, *given])
        for epoch, order in sorted(given.items()):
            if order is None or (epoch, order) in self._seen:
                continue
            self._seen.add((epoch, order))
            if epoch < self.epoch:
                self._complain(f"refused: {order} of epoch {epoch}; epoch {self.epoch} is in charge")
        return given.get(self.epoch)

    def _given(self) -> Dict[int, Optional[str]]:
        found: Dict[int, Optional[str]] = {}
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError:  # the folder was removed: whoever did that shall not end the ranks
            return {}
        for name in names:
            match = ORDER_FILE.fullmatch(name)
            record = _read(self._folder / name) if match else None
            if match and record is not None and record.get("epoch") == int(match.group(1)):
                order = record.get("order")
                found[int(match.group(1))] = order if isinstance(order, str) and order in STRENGTH else None
        return found


def outweighs(order: Optional[str], other: Optional[str]) -> bool:
    """Whether an order takes the place of another one."""
    return order is not None and (other is None or STRENGTH.index(order) > STRENGTH.index(other))


def _read(path: Path) -> Optional[Dict[str, object]]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None

"""Where a rank sits in one attempt: its number, how many there are, and where they meet.

The first attempt of a process may have it from torchrun; of every other one the guard tells it, in a file.

    CONTROL/seat-<k>.json   {"words": ["train", JOB, GANG, ROOT], "ranks": [of this host, by local rank],
                             "world_size": n, "meet": [address, port], "files": folder of rank-<r>.pid}
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gangline.runs.files import read_json
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one process in one attempt."""

    number: int
    """Attempts of this process are counted from 1."""
    words: tuple[str, ...]
    """`train JOB GANG ROOT`"""
    rank: int
    files: Path
    """Where rank-<r>.pid and the like go."""
    environment: dict[str, str] = field(default_factory=dict)
    """What is different from that of the process; {}: nothing, torchrun has told it."""

    def take(self) -> None:
        """Let this process be that rank."""
        os.environ.update(self.environment)


def first_seat(control: Path, words: tuple[str, ...]) -> Seat:
    """The guard's word if there is one, else torchrun's."""
    told = read_seat(control, 1)
    if told is not None:
        return told
    _, _, gang, root = words
    described = Gang.load(Path(gang))
    files = RunLayout(Path(root), described.run_id).attempt(described.attempt)
    return Seat(number=1, words=words, rank=int(os.environ.get("RANK", "0")), files=files)


def read_seat(control: Path, number: int) -> Seat | None:
    """The seat of this process in its attempt `number`; None as long as there is none."""
    try:
        told = read_json(control / f"seat-{number}.json")
    except FileNotFoundError:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank, (address, port) = int(told["ranks"][local]), told["meet"]
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(told["world_size"]),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(told["ranks"])),
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
        # rank 0 keeps the store; the launchers of these ranks may never have met
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return Seat(
        number=number,
        words=tuple(str(word) for word in told["words"]),
        rank=rank,
        files=Path(told["files"]),
        environment=environment,
    )

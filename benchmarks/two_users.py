"""Two users of one host start side by side: do ranks ever meet those of the other run?

    python -m benchmarks.two_users --out two_users.jsonl --starts 100        # as root: the users are 1001 and 1002

Each start: both users look for a free port at the same moment, by the agent's own verb with claims of their own; then
the two ranks of each come to that port in a random order, with random delays of up to half a second, and join by the
worker's own `join`. In every second start the users are given the same port, as after the worst coincidence. A rank
that joins adds up the numbers of its gang over gloo: 2 or 20, and anything else is a wrong meeting. One JSON line per
start; a file that has lines already is continued. Exit status 1 after a wrong meeting, or if a start with ports of
their own did not join.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401  (another user may not be able to read the standard library of this Python)
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gangline.agent.netprobe import free_ports
from gangline.errors import GanglineError
from gangline.runs.gang import Gang, GangRank
from gangline.worker.process_group import join

USERS = {1001: 1.0, 1002: 10.0}
"""The number that each rank of a user has."""
HERE = "127.0.0.1"
RANKS = (GangRank(host="pc1", share=1), GangRank(host="pc2", share=1))
PATIENCE_S = 20.0
FORK = multiprocessing.get_context("fork")

Line = dict[str, Any]


def main() -> int:
    """Try the starts that the file does not have."""
    arguments = _arguments()
    lines = [json.loads(text) for text in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    torch.set_num_threads(1)
    while len(lines) < arguments.starts:
        lines.append(try_start(len(lines), has_token=not arguments.no_token))
        with arguments.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(lines[-1]) + "\n")
    return summary(lines)


def try_start(number: int, *, has_token: bool) -> Line:
    """One start of two gangs of two ranks."""
    chance, begun = random.Random(number), time.monotonic()
    is_worst = number % 2 == 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        ports = _together([(uid, _find_port, (uid, folder)) for uid in USERS])
    found = dict(zip(USERS, ports, strict=True))
    shared = free_ports.free({"address": HERE, "range": [29600, 29999]})["port"]
    port_of = dict.fromkeys(USERS, shared) if is_worst else found
    calls = [
        (uid, _be_rank, (uid, rank, port_of[uid], chance.uniform(0.0, 0.5), has_token))
        for uid in USERS
        for rank in range(len(RANKS))
    ]
    chance.shuffle(calls)
    said = _together(calls)
    ends = [(call[0], end) for call, end in zip(calls, said, strict=True)]
    wrong = [end for uid, end in ends if isinstance(end, float) and end != len(RANKS) * USERS[uid]]
    joined = sum(isinstance(end, float) for _, end in ends)
    refused = Counter(end for _, end in ends if isinstance(end, str))
    seconds = round(time.monotonic() - begun, 1)
    return {
        "same_port": is_worst,
        "ports": found,
        "joined": joined,
        "wrong": wrong,
        "refused": refused,
        "seconds": seconds,
    }


def _find_port(uid: int, folder: str) -> int:
    asked = {"address": HERE, "range": [29500, 29999], "claims": f"{folder}/{uid}", "hold_s": 60}
    port: int = free_ports.free(asked)["port"]
    return port


def _be_rank(uid: int, rank: int, port: int, delay_s: float, has_token: bool) -> float | str:
    """The sum over the gang, or the first words of the error."""
    time.sleep(delay_s)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(len(RANKS)), MASTER_ADDR=HERE, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    gang = Gang(
        run_id=f"run-of-{uid}", attempt=1, ranks=RANKS, token=str(uid) * has_token, collective_timeout_s=PATIENCE_S
    )
    try:
        join(gang)
        number = torch.tensor([USERS[uid]])
        dist.all_reduce(number)
        dist.barrier()
    except (GanglineError, RuntimeError, OSError) as error:
        return str(error).splitlines()[0][:60]
    return float(number.item())


def _together(calls: Sequence[tuple[int, Any, tuple[Any, ...]]]) -> list[Any]:
    """What functions return, each in a process of its user."""
    running = []
    for uid, work, words in calls:
        mine, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_as_user, args=(uid, work, words, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, mine))
    said = []
    for process, mine in running:
        said.append(mine.recv() if mine.poll(PATIENCE_S + 10) else "no answer")
        process.kill()
        process.join()
    return said


def _as_user(uid: int, work: Any, words: tuple[Any, ...], answer: Connection) -> None:
    if os.getuid() == 0:
        os.setgid(uid)
        os.setuid(uid)
    answer.send(work(*words))
    time.sleep(1.0)  # the store of rank 0 stays until the others have left
    os._exit(0)


def summary(lines: Sequence[Line]) -> int:
    """Print the figures."""
    for is_same in (False, True):
        rows = [line for line in lines if line["same_port"] is is_same]
        own = sum(line["joined"] == 2 * len(RANKS) for line in rows)
        wrong = sum(len(line["wrong"]) for line in rows)
        refused = sum((Counter(line["refused"]) for line in rows), Counter())
        what = "the same port" if is_same else "a port each"
        print(f"{what}: {len(rows)} starts; both gangs joined in {own}, wrong meetings {wrong}; {dict(refused)}")
    bad = [line for line in lines if line["wrong"] or (not line["same_port"] and line["joined"] < 2 * len(RANKS))]
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--no-token", action="store_true", help="ranks do not compare anything, as without gangline")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""What test_meeting asks of a process that has torch."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from gangline.errors import RunFailed
from gangline.runs.gang import Gang, GangRank
from gangline.worker.launch import loopback_store
from gangline.worker.process_group import await_listener, meeting_place

TIMEOUT = timedelta(seconds=20)
RANKS = (GangRank(host="pc1", share=1), GangRank(host="pc2", share=1))


def meet(*, tokens: list[str], ranks: list[int]) -> list[str]:
    """One rank after the other comes to the store of a launcher; what each finds."""
    store = loopback_store(dist.TCPStore, "127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    return [_come(token, rank) for token, rank in zip(tokens, ranks, strict=True)]


def _come(token: str, rank: int) -> str:
    gang = Gang(run_id="calm-otter-7", attempt=1, ranks=RANKS, token=token)
    try:
        meeting_place(gang, rank, timeout=TIMEOUT).set("word", "here")
    except RunFailed as error:
        return error.what
    return "joins"


def early() -> list[bool]:
    """Whether somebody listens when a rank that came first has waited: once it is late, and once it never does."""
    found = []
    for opens in (True, False):
        with socket.socket() as late:
            late.bind(("127.0.0.1", 0))
            port = late.getsockname()[1]
            opening = threading.Timer(0.3, late.listen if opens else lambda: None)
            opening.start()
            await_listener("127.0.0.1", port, patience_s=20.0 if opens else 0.5)
            with socket.socket() as knock:
                found.append(knock.connect_ex(("127.0.0.1", port)) == 0)
            opening.join()
    return found


def doors() -> list[str]:
    """Where the store of rank 0 listens that no launcher keeps: on this computer, and for others."""
    found = []
    for address in ("127.0.0.1", "localhost"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
        gang = Gang(run_id="calm-otter-7", attempt=1, ranks=RANKS[:1], token="a")
        store = meeting_place(gang, 0, timeout=TIMEOUT)
        with socket.socket() as other:  # would be taken if the store listened on all addresses
            other.bind(("127.0.0.2", port))
            other.listen()
        found.append("loopback" if store.num_keys() else "")
    return found

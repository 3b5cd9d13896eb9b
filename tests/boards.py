"""The start board of an attempt, as a supervisor writes it."""

from collections.abc import Sequence

from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.supervise.startup import StartBoard


def write_board(layout: RunLayout, attempt: int, hosts: Sequence[str]) -> None:
    """board.json of an attempt with one rank on each of these hosts."""
    parts = [
        HostRequest(host=host, folder="/", rank_files="/", argv=(), env={}, ranks=(rank,))
        for rank, host in enumerate(hosts)
    ]
    board = StartBoard(LaunchRequest(run_id=layout.run_id, attempt=attempt, hosts=tuple(parts)))
    layout.attempt(attempt).mkdir(parents=True, exist_ok=True)
    write_record(layout.board(attempt), board.to_json(sentence=None))

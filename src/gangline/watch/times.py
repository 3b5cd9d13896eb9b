"""Where the time of a run went, as a table of its ranks."""

from __future__ import annotations

from gangline.planning.spent import RankTime, TimeReport
from gangline.units import format_duration
from gangline.watch.table import table

MOST_ROWS = 16
COLUMNS = ("computes", "data", "waits", "network", "rest")


def time_table(report: TimeReport) -> list[str]:
    """Parts of the time of all steps, by rank:

    time of 398 steps, 12 min 03 s (waits: for slower ranks)
    host  rank  computes  data  waits  network  rest
    pc1   0         82 %   0 %    9 %      4 %   5 %
    """
    head = f"time of {report.num_steps} steps, {format_duration(report.total_s)}"
    rows = [(each.host, str(each.rank), *_parts(each)) for each in report.ranks[:MOST_ROWS]]
    more = len(report.ranks) - MOST_ROWS
    return [
        f"{head} (waits: for slower ranks)",
        *table(("host", "rank", *COLUMNS), rows),
        *([f"and {more} ranks more, see times.json"] if more > 0 else []),
    ]


def _parts(rank: RankTime) -> list[str]:
    """Of the rank's own time, right-aligned below their names."""
    seconds = (rank.compute_s, rank.data_s, rank.waits_s, rank.network_s, rank.rest_s)
    whole_s = sum(seconds) or 1.0
    return [f"{100 * each / whole_s:.0f} %".rjust(len(name)) for each, name in zip(seconds, COLUMNS, strict=True)]

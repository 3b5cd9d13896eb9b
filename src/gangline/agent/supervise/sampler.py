"""What a host does while a run is on it, every 2 s: a process of its own beside the host agent, in one bounded file.

Its first line says whose samples they are. Then, in any order of kinds:

    {"columns": [name, ...]}                 of the rows that follow
    [time, count, [value, ...], [most, ...]] the mean of `count` samples from `time` on, and the most of each column;
                                             the last is missing where count is 1, a value that is not known is null,
                                             and a row is shorter where columns are newer
    {"event": kind, "time": ..., ...}        throttled, throttled-over, foreign, foreign-over, ecc, lost

A count is a power of two. Of each count the newest 360 rows are kept; the two oldest become one of twice the count:
12 minutes stay whole, and a run of ten days has some 4,000 rows. A later attempt of the run goes on with the file.

It is a process because a driver that hangs holds whoever asks it. Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from array import array
from collections import deque
from itertools import zip_longest
from math import isnan
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from gangline.agent.host_facts.samples import CardReader, Figures, HostReader
from gangline.agent.host_files import SCHEMA_VERSION, read_text
from gangline.agent.supervise import processes

INTERVAL_S = 2.0
LEVEL_ROWS = 360
MOST_EVENTS = 500
MOST_COLUMNS = 400
MOST_NAMED = 8
BEGIN_LOOKS, END_LOOKS = 3, 15
"""How many looks in a row have to see a state before it has begun, and not see it before it is over."""
PR_SET_PDEATHSIG = 1
NICE = 5
MOST_DESCRIPTORS = 4096
NAN = float("nan")


class SeriesRow(NamedTuple):
    """The mean of some samples. Single floats: ten days of a host with eight cards stay within some megabytes."""

    time: float
    """Of the first, in seconds since 1970."""
    samples: int
    values: "array[float]"
    """By number of the column; NaN: not known. A column may be newer than the row, which is shorter then."""
    most: "array[float]"


def merged(first: SeriesRow, second: SeriesRow) -> SeriesRow:
    """Two rows as one: means weighted by their counts, a column that only one of them has as it has it."""
    count = first.samples + second.samples
    weights = (first.samples / count, second.samples / count)
    values = [
        second_value
        if isnan(value)
        else value
        if isnan(second_value)
        else weights[0] * value + weights[1] * second_value
        for value, second_value in zip_longest(first.values, second.values, fillvalue=NAN)
    ]
    pairs = zip_longest(first.most, second.most, fillvalue=NAN)
    most = [second_most if isnan(value) or second_most > value else value for value, second_most in pairs]
    return SeriesRow(first.time, count, array("f", values), array("f", most))


class SampleSeries:
    """The rows and events of a file, bounded. Raises OSError where the file cannot be written."""

    def __init__(self, path: Path, *, head: Mapping[str, Any]) -> None:
        self._path = path
        self._head = dict(head)
        self._columns: List[str] = []
        self._levels: List[Deque[SeriesRow]] = []
        self._events: Deque[Dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._appended = LEVEL_ROWS  # the first one writes the whole file
        self._read()

    def add(self, now: float, figures: Figures, events: Iterable[Dict[str, Any]] = ()) -> None:
        """Take in one sample and write it."""
        new = [name for name in figures if name not in self._columns][: MOST_COLUMNS - len(self._columns)]
        self._columns += new
        values = array("f", [figures.get(name, NAN) for name in self._columns])
        row = SeriesRow(now, 1, values, values)
        self._keep(row, 0)
        events = list(events)
        self._events.extend(events)
        self._appended += 1
        if self._appended > LEVEL_ROWS:
            self._write_whole()
            return
        lines = ([self._column_line()] if new else []) + [json.dumps(event) for event in events] + [self._line(row)]
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write("".join(line + "\n" for line in lines))

    def _keep(self, row: SeriesRow, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append(deque())
        rows = self._levels[level]
        rows.append(row)
        if len(rows) > LEVEL_ROWS + 1:
            self._keep(merged(rows.popleft(), rows.popleft()), level + 1)

    def _write_whole(self) -> None:
        fresh = self._path.with_name(".{}.tmp".format(self._path.name))
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(self._head) + "\n" + self._column_line() + "\n")
            for event in self._events:
                stream.write(json.dumps(event) + "\n")
            for rows in reversed(self._levels):
                stream.writelines(self._line(row) + "\n" for row in rows)
        fresh.replace(self._path)
        self._appended = 0

    def _column_line(self) -> str:
        return json.dumps({"columns": self._columns})

    def _line(self, row: SeriesRow) -> str:
        parts = ["{:.1f}".format(row.time), str(row.samples), self._cells(row.values)]
        return "[{}]".format(",".join(parts + ([self._cells(row.most)] if row.samples > 1 else [])))

    def _cells(self, values: "array[float]") -> str:
        return "[{}]".format(",".join("null" if isnan(value) else "{:.6g}".format(value) for value in values))

    def _read(self) -> None:
        """Take over what an earlier attempt has left; a damaged line is passed over."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return
        columns: List[int] = []
        for line in lines[1:]:
            try:
                said = json.loads(line)
                if isinstance(said, list):
                    values, most = (self._placed(columns, cells) for cells in (said[2], said[-1]))
                    row = SeriesRow(float(said[0]), int(said[1]), values, most)
                    self._keep(row, max(0, row.samples.bit_length() - 1))
                elif "columns" in said:
                    self._columns += [name for name in said["columns"] if name not in self._columns]
                    columns = [self._columns.index(name) for name in said["columns"]]
                elif "event" in said:
                    self._events.append(said)
            except (ValueError, LookupError, TypeError):
                continue

    def _placed(self, columns: List[int], cells: List[Any]) -> "array[float]":
        values = array("f", [NAN] * len(self._columns))
        for column, value in zip(columns, cells):
            values[column] = NAN if value is None else float(value)
        return values


class CardEvents:
    """What happens to the cards of a run, as events. owned: the processes of the run now, by pid."""

    def __init__(self, owned: Callable[[], Iterable[int]]) -> None:
        self._owned = owned
        self._seen: Dict[Tuple[str, int], int] = {}
        """(kind, card) -> looks in a row that saw it; negative: that did not, while it is on."""
        self._on: Dict[Tuple[str, int], float] = {}
        """What has begun, and when."""
        self._ecc: Dict[int, float] = {}

    def look(self, now: float, cards: CardReader, figures: Figures) -> List[Dict[str, Any]]:
        """The events since the last look."""
        found: List[Dict[str, Any]] = []
        for card in cards.cards:
            index = card["index"]
            about = {"time": round(now, 1), "gpu": index, "simulated": card["simulated"]}
            reasons = cards.throttle.get(index, [])
            hot = {"reasons": reasons, "temperature_c": figures.get("gpu/{}/temperature_c".format(index))}
            self._state(found, "throttled", about, hot, is_on=bool(reasons))
            others = self._foreign(cards.processes.get(index, [])) if card.get("uuid") else []
            self._state(found, "foreign", about, {"processes": others}, is_on=bool(others))
            self._state(found, "lost", about, {}, is_on="gpu/{}/lost".format(index) in figures)
            errors = figures.get("gpu/{}/ecc_uncorrected".format(index))
            if errors is not None:
                if errors > self._ecc.get(index, errors):
                    found.append(dict(about, event="ecc", uncorrected=int(errors - self._ecc[index])))
                self._ecc[index] = errors
        return found

    def _state(
        self,
        found: List[Dict[str, Any]],
        kind: str,
        about: Dict[str, Any],
        details: Dict[str, Any],
        *,
        is_on: bool,
    ) -> None:
        key = (kind, about["gpu"])
        began = self._on.get(key)
        if is_on == (began is not None):
            self._seen[key] = 0
            return
        self._seen[key] = self._seen.get(key, 0) + 1
        if began is None and self._seen[key] >= BEGIN_LOOKS:
            self._on[key] = about["time"]
            self._seen[key] = 0
            found.append(dict(about, event=kind, **details))
        elif began is not None and self._seen[key] >= END_LOOKS:
            del self._on[key]
            self._seen[key] = 0
            found.append(dict(about, event=kind + "-over", seconds=round(about["time"] - began, 1)))

    def _foreign(self, pids: List[int]) -> List[Dict[str, Any]]:
        """Processes of this host that are not of the run; those that a container hides are not known."""
        if not pids:
            return []
        names = {pid: _name_of(pid) for pid in sorted(set(pids) - set(self._owned()))}
        return [{"pid": pid, "name": name} for pid, name in names.items() if name is not None][:MOST_NAMED]


def _name_of(pid: int) -> Optional[str]:
    return read_text("/proc/{}/comm".format(pid))


def start_sampler(request: Mapping[str, Any], *, slots: List[str]) -> None:
    """Have a child of this process sample for a request, until this process ends it or ends; without a file in the
    request, do nothing. slots: the leases of the request, which name its cards.
    """
    path = request.get("samples")
    if not path:
        return
    parent = os.getpid()
    if os.fork():
        return
    try:
        _alone(parent)
        _sample(Path(path), request, slots, parent)
    except BaseException:  # noqa: BLE001  (a run goes on without samples; the agent's log keeps the cause)
        traceback.print_exc()
    finally:
        os._exit(0)


def _alone(parent: int) -> None:
    """Hold nothing of the parent's, and end with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the host's shutdown: the run saves first, and its samples go on
    os.closerange(3, MOST_DESCRIPTORS)  # leases, and the port where the gang meets
    os.nice(NICE)
    if os.getppid() != parent:
        os._exit(0)


def _sample(path: Path, request: Mapping[str, Any], slots: List[str], parent: int) -> None:
    host = HostReader()
    host.figures()
    uuids = tuple(slot[len("gpu-") :] for slot in slots if slot.startswith("gpu-"))
    cards = CardReader(uuids)
    head = {"samples": request["host"], "run_id": request.get("run_id", ""), "schema_version": SCHEMA_VERSION}
    series = SampleSeries(path, head=dict(head, interval_s=INTERVAL_S, cards=cards.cards))
    events = CardEvents(lambda: [parent, *(each.pid for each in processes.descendants(parent))])
    due = time.monotonic()
    complained = ""
    while True:
        due = max(due + INTERVAL_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.time()
        figures = {**host.figures(), **cards.figures()}
        found = events.look(now, cards, figures)
        try:
            series.add(now, figures, found)
        except OSError as error:  # a full disk: the rows stay, and are written with the next whole file
            if str(error) != complained:
                complained = str(error)
                traceback.print_exc()

"""What the hosts of a run did meanwhile, out of their samples: figures for tables, and what explains a slow step.

The file is written by the host agent's sampler (gangline/agent/supervise/sampler.py) and read as it is: hosts are not
trusted, so a line that is none is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

from gangline.transport.ssh_options import printable
from gangline.transport.transport import Transport
from gangline.units import format_bytes, format_duration

PIECE_BYTES = 1 << 22
MOST_BYTES = 1 << 26
LETTERS = 80
MOST_TOLD = 40


@dataclass(slots=True, kw_only=True)
class HostSamples:
    """The samples of one host."""

    host: str
    interval_s: float = 2.0
    cards: list[Mapping[str, Any]] = field(default_factory=list)
    """Index, name, and `simulated` of each card."""
    rows: list[tuple[float, int, dict[str, float], dict[str, float]]] = field(default_factory=list)
    """Time, number of samples, their means, the most of each: the oldest first."""
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def is_simulated(self) -> bool:
        """Whether a card is a stand-in for tests."""
        return any(card.get("simulated") for card in self.cards)

    def mean(self, name: str) -> float | None:
        """Over all samples that have the figure; None without any."""
        told = [(count, means[name]) for _, count, means, _ in self.rows if name in means]
        whole = sum(count for count, _ in told)
        return sum(count * value for count, value in told) / whole if whole else None

    def most(self, name: str) -> float | None:
        """The most of all samples; None without any."""
        return max((most[name] for *_, most in self.rows if name in most), default=None)

    def num(self, name: str) -> int:
        """How many samples have the figure."""
        return sum(count for _, count, means, _ in self.rows if name in means)

    def names(self, begin: str, end: str = "") -> list[str]:
        """Figures whose names begin and end so."""
        found = {name: None for *_, means, _ in self.rows for name in means}
        return [name for name in found if name.startswith(begin) and name.endswith(end)]


def read_samples(host: str, transport: Transport, path: PurePath) -> HostSamples:
    """Read the samples of a host, empty where there are none; raises HostUnreachable, OSError."""
    data = b""
    while len(data) < MOST_BYTES:
        try:
            piece = transport.read(path, offset=len(data), limit=PIECE_BYTES)
        except FileNotFoundError:
            break
        if not piece:
            break
        data += piece
    return parse_samples(host, data.splitlines())


def parse_samples(host: str, lines: Iterable[bytes]) -> HostSamples:
    """The samples of a file's lines; lines that are none are passed over."""
    reader = _LineReader(host)
    for line in lines:
        reader.take(line)
    return reader.found


class _LineReader:
    """Reads a file of samples line by line: rows have the columns that were named last."""

    def __init__(self, host: str) -> None:
        self.found = HostSamples(host=host)
        self._columns: list[str] = []

    def take(self, line: bytes) -> None:
        """Read one line."""
        try:
            self._read(json.loads(line))
        except (ValueError, LookupError, TypeError):
            return

    def _read(self, said: Any) -> None:
        if isinstance(said, list):
            means, most = (_figures(self._columns, cells) for cells in (said[2], said[-1]))
            self.found.rows.append((float(said[0]), int(said[1]), means, most))
        elif "columns" in said:
            self._columns = [printable(str(name))[:LETTERS] for name in said["columns"]]
        elif "event" in said:
            self.found.events.append({**said, "time": float(said["time"])})
        elif "samples" in said:
            self.found.interval_s = min(3600.0, max(0.1, float(said["interval_s"])))
            self.found.cards = [{**card} for card in said["cards"]]


class SampleTail:
    """The samples of one host, read again and again: what is new, and everything once the file was written anew."""

    def __init__(self, host: str, transport: Transport, path: PurePath) -> None:
        self._host, self._transport, self._path = host, transport, path
        self._begin()

    def _begin(self) -> None:
        self._reader = _LineReader(self._host)
        self._offset = 0
        self._last = b""
        """The last whole line that was read, with its end: where it stands no more, the file is another one."""

    def look(self) -> HostSamples:
        """All samples until now, empty where there are none; raises HostUnreachable, OSError."""
        try:
            while data := self._new():
                *lines, _ = data.split(b"\n")
                for line in lines:
                    self._reader.take(line)
                if not lines:
                    break
                self._offset += sum(len(line) + 1 for line in lines)
                self._last = lines[-1] + b"\n"
        except FileNotFoundError:
            pass
        return self._reader.found

    def _new(self) -> bytes:
        begin = self._offset - len(self._last)
        data = self._transport.read(self._path, offset=begin, limit=PIECE_BYTES)
        if not data.startswith(self._last):
            self._begin()
            data = self._transport.read(self._path, limit=PIECE_BYTES)
        return data[len(self._last) :]


def _figures(columns: Sequence[str], cells: Sequence[Any]) -> dict[str, float]:
    pairs = ((name, float(value)) for name, value in zip(columns, cells, strict=False) if value is not None)
    return {name: value for name, value in pairs if math.isfinite(value)}


# A table of the hosts, and one of their cards.


HOST_HEADER = ("host", "processor", "memory", "network", "disk", "waited for")
CARD_HEADER = ("host", "GPU", "in use", "memory", "power", "energy", "temperature", "slowed")


def host_rows(hosts: Iterable[HostSamples]) -> list[tuple[str, ...]]:
    """What each host did, as cells under HOST_HEADER."""
    return [
        (
            each.host,
            _span(each, "cpu_percent", "{:.0f} %"),
            _span(each, "memory_bytes", None),
            "; ".join(f"{name.split('/')[1]} {_both_ways(each, name)}" for name in _busiest(each)) or "-",
            f"reads {_disk(each, 'read')}, writes {_disk(each, 'write')}",
            ", ".join(
                f"{name.split('/')[1].removesuffix('_percent')} {mean:.0f} %"
                for name in each.names("pressure/")
                if (mean := each.mean(name) or 0.0) >= 1.0
            )
            or "-",
        )
        for each in hosts
        if each.rows
    ]


def card_rows(hosts: Iterable[HostSamples]) -> list[tuple[str, ...]]:
    """What each card did, as cells under CARD_HEADER; one that is a stand-in says so."""
    return [_card(each, card, f"gpu/{card.get('index')}/") for each in hosts if each.rows for card in each.cards]


def _card(host: HostSamples, card: Mapping[str, Any], begin: str) -> tuple[str, ...]:
    watts = host.mean(begin + "power_w")
    hours = host.num(begin + "power_w") * host.interval_s / 3600
    slowed = host.mean(begin + "throttled_percent")
    label = " (simulated)" if card.get("simulated") else ""
    return (
        host.host,
        f"{card.get('index')}: {printable(str(card.get('name')))[:LETTERS]}{label}",
        _span(host, begin + "utilization_percent", "{:.0f} %"),
        _span(host, begin + "memory_bytes", None),
        _span(host, begin + "power_w", "{:.0f} W"),
        "-" if watts is None else f"{watts * hours / 1000:.3g} kWh",
        _span(host, begin + "temperature_c", "{:.0f} C"),
        "-" if slowed is None else f"{slowed:.0f} % of the time",
    )


def _span(host: HostSamples, name: str, form: str | None) -> str:
    mean, most = host.mean(name), host.most(name)
    if mean is None or most is None:
        return "-"
    shown = [format_bytes(value) if form is None else form.format(value) for value in (mean, most)]
    return f"{shown[0]}, at most {shown[1]}"


def _busiest(host: HostSamples) -> list[str]:
    """The two interfaces that received and sent most, without loopback unless it is the only one."""
    names = host.names("net/", "/rx_bytes_per_s")
    names = [name for name in names if name != "net/lo/rx_bytes_per_s"] or names
    both = {name: (host.mean(name) or 0.0) + (host.mean(_sent(name)) or 0.0) for name in names}
    return sorted(both, key=lambda name: -both[name])[:2]


def _sent(name: str) -> str:
    return name.replace("/rx_", "/tx_")


def _both_ways(host: HostSamples, name: str) -> str:
    return f"receives {_rate(host, name)}, sends {_rate(host, _sent(name))}"


def _disk(host: HostSamples, way: str) -> str:
    mean, most = (each(f"disk/{way}_bytes_per_s") for each in (host.mean, host.most))
    return "-" if mean is None or most is None else f"{format_bytes(mean)}/s (at most {format_bytes(most)}/s)"


def _rate(host: HostSamples, name: str) -> str:
    mean, most = host.mean(name), host.most(name)
    return "-" if mean is None or most is None else f"{mbit(mean)} (at most {mbit(most)})"


def mbit(bytes_per_s: float) -> str:
    """A rate in Mbit/s or Gbit/s."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


# What happened to the cards, by step, and which stragglers it explains.


KINDS = ("throttled", "foreign", "ecc", "lost")


def card_events(hosts: Iterable[HostSamples], steps: Sequence[tuple[float, int]]) -> list[tuple[float, str]]:
    """Time and sentence of what happened to the cards of a run. steps: when each one was written, in order."""
    found = [
        (float(event["time"]), f"{host.host} {_sentence(event, host.events, steps)}")
        for host in hosts
        for event in host.events
        if event.get("event") in KINDS
    ]
    return sorted(found)[:MOST_TOLD]


def reason_at(host: HostSamples, time: float) -> str | None:
    """What certainly slowed the cards of a host at that time: heat or power, or another program; None: nothing did."""
    for event in reversed(host.events):
        if event.get("event") not in {"throttled", "foreign"} or event["time"] > time:
            continue
        end = _end(event, host.events)
        if end is None or end >= time:
            return _sentence(event, (), ())
    return None


def others_on(host: HostSamples, gpu: object) -> list[str]:
    """Programs that are no part of the run and compute on a card, as far as the samples tell by now."""
    told = [each for each in host.events if each.get("event") in {"foreign", "foreign-over"} and each.get("gpu") == gpu]
    return [f"another program: {_names(told[-1])}"] if told and told[-1]["event"] == "foreign" else []


def _end(event: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> float | None:
    """When what an event began was over; None: it goes on, or its end was not seen."""
    name = f"{event.get('event')}-over"
    later = [
        each["time"]
        for each in events
        if each.get("event") == name and each.get("gpu") == event.get("gpu") and each["time"] >= event["time"]
    ]
    return min(later, default=None)


def _sentence(event: Mapping[str, Any], events: Iterable[Mapping[str, Any]], steps: Sequence[tuple[float, int]]) -> str:
    step = next((number for time, number in steps if time >= event["time"]), None)
    since = "" if step is None else f" from step {step:,}"
    end = _end(event, events)
    lasted = "" if end is None else f" for {format_duration(end - event['time'])}"
    label = " (simulated)" if event.get("simulated") else ""
    card = f"GPU {event.get('gpu')}{label}"
    if event["event"] == "throttled":
        heat = event.get("temperature_c")
        why = ", ".join(printable(str(reason))[:LETTERS] for reason in event.get("reasons", ()))
        shown = f"{heat:.0f} C, {why}" if isinstance(heat, int | float) else why
        return f"{card} throttled{since}{lasted}: {shown}"
    if event["event"] == "foreign":
        return f"{card} had another program on it{since}{lasted}: {_names(event)}"
    if event["event"] == "ecc":
        return f"{card} had {event.get('uncorrected')} uncorrected memory errors{since}"
    return f"{card} did not answer{since}{lasted}"


def _names(event: Mapping[str, Any]) -> str:
    rows = [row for row in event.get("processes", ()) if isinstance(row, Mapping)]
    return ", ".join(f"{printable(str(row.get('name')))[:LETTERS]} (pid {row.get('pid')})" for row in rows)


def seconds_of(time: object) -> float | None:
    """A time of a record in seconds since 1970; None for anything else."""
    try:
        moment = datetime.fromisoformat(str(time).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()

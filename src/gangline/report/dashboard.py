"""The screen of `gangline top`, out of what was read of hosts and of a run: lines of styled text. Pure.

What is drawn is what was last heard, with its age where that is not now; a figure that nobody told is missing. Cells
flow into lines of the given width, so that 20 and 300 columns show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gangline.inventory.facts import HostFacts
from gangline.launch.backend import HostStatus
from gangline.report.follow import BoardRecord, board_line
from gangline.report.host_samples import HostSamples, card_events, mbit, others_on, seconds_of
from gangline.report.live import curve
from gangline.report.machine_totals import totals_of
from gangline.report.tail import History
from gangline.report.text_table import clean, event_line
from gangline.runs.registry import RunRecord
from gangline.units import counted, format_bytes, format_duration, listed_ranks

ShownStyle = Literal["", "title", "dim", "good", "warn", "bad"]
Span = tuple[str, ShownStyle]
ShownLine = list[Span]

FRESH_S = 10.0
"""What is older than this is shown with its age: hosts are looked at every 2 s."""
SHOWN_EVENTS = 8
SHOWN_SAMPLES = 60
CURVE_ROWS = 8
NARROW = 60


@dataclass(slots=True, kw_only=True)
class WatchedHost:
    """What is known of one host."""

    name: str
    samples: HostSamples | None = None
    """What it does; None: nobody has told yet."""
    facts: HostFacts | None = None
    """What it is."""
    cpu: str = ""
    """The model of its processor."""
    silent: str = ""
    """Why it could not be asked the last time."""
    heard: float | None = None
    """When its last sample came, in seconds since 1970 by our clock; of one from before the first look, by its own."""

    def take(self, samples: HostSamples, now: float) -> None:
        """Keep what was read of it at that time."""
        last = samples.rows[-1][0] if samples.rows else None
        if last != self._last:
            self.heard = last if self.samples is None else now
        self.samples, self._last = samples, last

    _last: float | None = None
    """The time of its last sample, by its clock."""

    def now(self, name: str) -> float | None:
        """A figure of the last sample."""
        return self.samples.rows[-1][2].get(name) if self.samples is not None and self.samples.rows else None

    def names(self, begin: str, end: str = "") -> list[str]:
        """Figures of the last sample whose names begin and end so."""
        told = self.samples.rows[-1][2] if self.samples is not None and self.samples.rows else {}
        return [name for name in told if name.startswith(begin) and name.endswith(end)]

    def past(self, name: str) -> list[float | None]:
        """A figure of the last samples, the oldest first."""
        rows = self.samples.rows[-SHOWN_SAMPLES:] if self.samples is not None else []
        return [means.get(name) for _, _, means, _ in rows]


@dataclass(slots=True, kw_only=True)
class WatchedRun:
    """What is known of one run."""

    record: RunRecord
    history: History = field(default_factory=History)
    events: list[dict[str, Any]] = field(default_factory=list)
    board: BoardRecord | None = None
    statuses: Sequence[HostStatus] = ()
    """What the host agents say now."""
    findings: Sequence[Mapping[str, Any]] = ()
    """Of the checks before its start."""
    gaps: Sequence[str] = ()
    """What could not be read."""


@dataclass(slots=True, kw_only=True)
class WatchedState:
    """Everything on the screen. now: seconds since 1970, by this computer's clock."""

    now: float
    hosts: Sequence[WatchedHost]
    run: WatchedRun | None = None
    """None: a cluster without a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How it is drawn. plain: without block and braille characters."""

    width: int
    plain: bool = False


def screen(seen: WatchedState, look: Look) -> list[ShownLine]:
    """All lines of the screen."""
    lines: list[ShownLine] = []
    if seen.run is not None:
        lines += _run_head(seen, seen.run, look)
    lines += _section("hosts", look) + _totals(seen.hosts, look)
    for host in seen.hosts:
        lines += _host(host, seen.now, look)
    if seen.run is not None:
        lines += _ranks(seen.run, look) + _losses(seen.run, look) + _events(seen, seen.run, look)
    return [part for line in lines for part in _folded(line, look.width)]


def text_of(line: ShownLine) -> str:
    """A line without its styles."""
    return "".join(text for text, _ in line).rstrip()


# Bars, sparklines, and cells that flow.


BLOCKS = " ▏▎▍▌▋▊▉█"
SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_SPARKS = "_.-=+*#@"


def bar(percent: float, columns: int, *, plain: bool = False) -> str:
    """A bar of so many columns, full at 100 %."""
    part = min(1.0, max(0.0, percent / 100.0))
    if plain:
        return ("#" * round(part * columns)).ljust(columns, ".")
    eighths = round(part * columns * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (BLOCKS[rest] if rest else "")).ljust(columns)


def sparkline(values: Sequence[float | None], columns: int, *, most: float, plain: bool = False) -> str:
    """The last values as columns; one that is not known is a blank."""
    signs = PLAIN_SPARKS if plain else SPARKS
    shown = values[-columns:]
    cells = [
        " " if value is None else signs[min(len(signs) - 1, int(len(signs) * max(0.0, value) / (most or 1.0)))]
        for value in shown
    ]
    return "".join(cells).rjust(columns)


def _flow(cells: Iterable[ShownLine], look: Look, *, indent: int = 2) -> list[ShownLine]:
    """Cells two blanks apart in as many lines as they need."""
    lines: list[ShownLine] = []
    line: ShownLine = []
    for cell in cells:
        if line and _width(line) + 2 + _width(cell) > look.width:
            lines.append(line)
            line = []
        line = [*line, ("  ", ""), *cell] if line else ([(" " * indent, ""), *cell] if lines else list(cell))
    return [*lines, line] if line else lines


def _width(line: ShownLine) -> int:
    return sum(len(text) for text, _ in line)


def _folded(line: ShownLine, width: int) -> list[ShownLine]:
    """A line in as many as it needs: an age that does not fit is not cut."""
    rows: list[ShownLine] = [[]]
    for text, style in line:
        rest = clean(text)
        while len(rest) > (room := width - _width(rows[-1])):
            rows[-1].append((rest[:room], style))
            rest = rest[room:]
            rows.append([])
        rows[-1].append((rest, style))
    return rows if text_of(rows[-1]) or len(rows) == 1 else rows[:-1]


def _section(title: str, look: Look) -> list[ShownLine]:
    rule = "-" if look.plain else "─"
    return [[(f"{title} ", "title"), (rule * max(0, look.width - len(title) - 1), "dim")]]


def _words(text: str, style: ShownStyle, look: Look) -> list[ShownLine]:
    """A sentence in as many lines as it needs."""
    return _flow_words(clean(text).split(" "), style, look)


def _flow_words(words: Sequence[str], style: ShownStyle, look: Look) -> list[ShownLine]:
    lines, row = [], ""
    for word in words:
        if row and len(row) + 1 + len(word) > look.width:
            lines.append(row)
            row = f"  {word}"
        else:
            row = f"{row} {word}" if row else word
        while len(row) > look.width:  # a path, say
            lines.append(row[: look.width])
            row = row[look.width :]
    return [[(text, style)] for text in (*lines, row) if text]


def _gauge(name: str, percent: float | None, words: str, past: Sequence[float | None], look: Look) -> ShownLine:
    """A name, a bar, figures, and a sparkline where there is room."""
    columns = 6 if look.width < NARROW else 10
    style: ShownStyle = "" if percent is None or percent < 70 else "warn" if percent < 90 else "bad"
    cell: ShownLine = [(f"{name} ", "dim")]
    if percent is not None:
        cell.append((bar(percent, columns, plain=look.plain), style or "good"))
        cell.append((" ", ""))
    cell.append((words, ""))
    if look.width >= NARROW and any(value is not None for value in past):
        cell.append((" " + sparkline(past, 20 if look.width >= 120 else 10, most=100.0, plain=look.plain), "dim"))
    return cell


# A host, and its cards.


def _totals(hosts: Sequence[WatchedHost], look: Look) -> list[ShownLine]:
    """Sums over the machines that told what they are: hosts on one machine count once. How many did not."""
    told = totals_of([host.facts for host in hosts if host.facts is not None])
    silent = len(hosts) - told.hosts
    cells: list[ShownLine] = [[(word, "")] for word in told.words(silent=silent)]
    if silent:
        cells.append([(f"what {counted(silent, 'host')} has is not known", "warn")])
    lines = _flow(cells, look)
    return lines + _words(told.weights_line(), "dim", look) if told.weights_line() else lines


def _host(host: WatchedHost, now: float, look: Look) -> list[ShownLine]:
    cells: list[ShownLine] = [[(host.name, "title")]]
    if (age := _age(host, now)) is not None:
        cells.append([(age, "warn")])
    if host.silent:
        cells.append([(host.silent, "bad")])
    cells += _machine(host)
    percent = host.now("cpu_percent")
    if percent is not None:
        cells.append(_gauge("cpu", percent, f"{percent:.0f} %", host.past("cpu_percent"), look))
    if (used := host.now("memory_bytes")) is not None:
        cells.append(_gauge("mem", host.now("memory_percent"), format_bytes(used), (), look))
    cells += _rates(host)
    lines = _flow(cells, look)
    for card in host.samples.cards if host.samples is not None else ():
        lines += _flow(_card(host, card, look), look, indent=4)
    return lines


def _machine(host: WatchedHost) -> list[ShownLine]:
    cells: list[ShownLine] = [[(host.cpu, "dim")]] if host.cpu else []
    if host.facts is None:
        return cells
    cells.append([(counted(host.facts.num_cpus, "CPU"), "dim")])
    if host.facts.memory_total_bytes is not None:
        cells.append([(f"{format_bytes(host.facts.memory_total_bytes)} RAM", "dim")])
    if host.facts.gpu_driver.version:
        label = " (simulated)" if host.facts.gpu_driver.simulated else ""
        cells.append([(f"driver {host.facts.gpu_driver.version}{label}", "dim")])
    return cells


def _age(host: WatchedHost, now: float) -> str | None:
    """How old its figures are; None: they are of now."""
    heard = host.heard
    if heard is None:
        return None if host.silent else "no samples"
    return f"last heard {format_duration(now - heard)} ago" if now - heard > FRESH_S else None


def _rates(host: WatchedHost) -> list[ShownLine]:
    cells: list[ShownLine] = []
    names = host.names("net/", "/rx_bytes_per_s")
    others = [name for name in names if name != "net/lo/rx_bytes_per_s"] or names
    others.sort(key=lambda name: -((host.now(name) or 0) + (host.now(name.replace("/rx_", "/tx_")) or 0)))
    for name in others[:1]:
        sent = host.now(name.replace("/rx_", "/tx_"))
        cells.append(_rate(name.split("/")[1], "in", host.now(name), "out", sent, form=mbit))
    read, written = host.now("disk/read_bytes_per_s"), host.now("disk/write_bytes_per_s")
    if read is not None or written is not None:
        cells.append(_rate("disk", "read", read, "write", written, form=lambda value: f"{format_bytes(value)}/s"))
    cells += [
        [(f"waits for {name.split('/')[1].removesuffix('_percent')} {value:.0f} %", "warn")]
        for name in host.names("pressure/")
        if (value := host.now(name) or 0.0) >= 10.0
    ]
    return cells


def _rate(name: str, one: str, first: float | None, other: str, second: float | None, *, form: Any) -> ShownLine:
    told = [f"{word} {form(value)}" for word, value in ((one, first), (other, second)) if value is not None]
    return [(f"{name} ", "dim"), (" ".join(told), "")]


def _card(host: WatchedHost, card: Mapping[str, Any], look: Look) -> list[ShownLine]:
    begin = f"gpu/{card.get('index')}/"
    label = " (simulated)" if card.get("simulated") else ""
    cells: list[ShownLine] = [[(f"  GPU {card.get('index')} {clean(str(card.get('name')))[:40]}{label}", "")]]
    if host.now(begin + "lost"):
        cells.append([("does not answer", "bad")])
    if (percent := host.now(begin + "utilization_percent")) is not None:
        cells.append(_gauge("in use", percent, f"{percent:.0f} %", host.past(begin + "utilization_percent"), look))
    if (used := host.now(begin + "memory_bytes")) is not None:
        cells.append(_gauge("mem", host.now(begin + "memory_percent"), format_bytes(used), (), look))
    for name, form in (("power_w", "{:.0f} W"), ("temperature_c", "{:.0f} C"), ("clock_mhz", "{:.0f} MHz")):
        if (value := host.now(begin + name)) is not None:
            cells.append([(form.format(value), "")])
    if host.now(begin + "throttled_percent"):
        cells.append([("throttled", "bad")])
    cells += (
        [[(words, "bad")] for words in others_on(host.samples, card.get("index"))] if host.samples is not None else []
    )
    if errors := host.now(begin + "ecc_uncorrected"):
        cells.append([(f"{errors:.0f} uncorrected memory errors", "bad")])
    return cells


# The run.


PHASE_STYLES: dict[str, ShownStyle] = {"running": "good", "finished": "good", "failed": "bad", "lost": "bad"}


def _run_head(seen: WatchedState, run: WatchedRun, look: Look) -> list[ShownLine]:
    record, last = run.record, run.history.last_step
    doubt = "?" if record.silent else ""
    cells: list[ShownLine] = [[(record.id, "title")], [(record.phase + doubt, PHASE_STYLES.get(record.phase, "warn"))]]
    if record.state is not None:
        cells.append([(f"attempt {record.state.attempt}", "")])
    if last is not None:
        cells += [[(text, "")] for text in _step_parts(last)]
        written = seconds_of(last.get("time"))
        if written is not None and seen.now - written > FRESH_S:
            cells.append([(f"step written {format_duration(seen.now - written)} ago", "warn")])
        remaining = run.history.remaining_s()
        if remaining is not None and record.phase == "running" and not record.silent:
            cells.append([(f"eta {format_duration(remaining)}", "")])
    lines = _flow(cells, look)
    for text in (record.silent, record.damage and f"{record.damage.what}: {record.damage.seen}", *run.gaps):
        lines += _words(str(text), "bad", look) if text else []
    if record.phase == "lost":
        lines += _words(f"its supervisor is dead; gangline attach {record.id} starts another one", "bad", look)
    if run.board is not None and not run.board["done"] and record.phase == "running":
        lines += _words(board_line(run.board), "warn", look)
        lines += _words(run.board["sentence"], "warn", look) if run.board["sentence"] else []
    return lines


def _step_parts(last: Mapping[str, Any]) -> list[str]:
    parts = [f"step {last.get('step')}/{last.get('steps', '?')}"]
    forms = (
        ("loss", "loss {:.4g}"),
        ("tokens_per_s", "{:,.0f} tok/s"),
        ("step_s", "{:.2f} s/step"),
        ("mfu", "mfu {:.0%}"),
    )
    return parts + [
        form.format(last[name]).replace(",", " ") for name, form in forms if isinstance(last.get(name), (int, float))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """One rank: where it stands now, and what it did in the last step."""

    rank: int
    host: str
    phase: str = "-"
    step: int | None = None
    same_s: float | None = None
    """For how long it has said the same."""
    share: float | None = None
    """Its part of the last step's batch, from 0 to 1."""
    compute_s: float | None = None
    wait_s: float | None = None
    """In the last step, for slower ranks."""
    waits_for: str = ""
    """Ranks that have not entered the collective in which it is."""


def ranks_of(run: WatchedRun) -> list[WatchedRank]:
    """All ranks that a host agent or the last step tells of."""
    last = run.history.last_step or {}
    rows = {
        row["rank"]: row for row in last.get("ranks") or () if isinstance(row, dict) and type(row.get("rank")) is int
    }
    whole = sum(_number(row.get("micro_batches")) or 0.0 for row in rows.values())
    signs = {
        sign.rank: (status.host, sign)
        for status in run.statuses
        if status.phase == "running" and status.signs is not None
        for sign in status.signs.ranks
    }
    found = []
    for rank in sorted(rows.keys() | signs.keys()):
        row, (host, sign) = rows.get(rank, {}), signs.get(rank, ("", None))
        mine = _number(row.get("micro_batches"))
        found.append(
            WatchedRank(
                rank=rank,
                host=host or clean(str(row.get("host", ""))),
                phase="-" if sign is None else sign.phase or "starts",
                step=None if sign is None else sign.step,
                same_s=None if sign is None else sign.same_s,
                share=mine / whole if mine is not None and whole else None,
                compute_s=_number(row.get("compute_s")),
                wait_s=_number(row.get("wait_others_s")),
                waits_for="" if sign is None else _waits_for(sign, signs),
            )
        )
    return found


def _waits_for(sign: Any, signs: Mapping[int, tuple[str, Any]]) -> str:
    """The ranks with the least progress, for one that is in a collective which they have not entered."""
    if sign.phase not in {"exchange", "joining"}:
        return ""
    behind = [
        (host, other.rank)
        for host, other in signs.values()
        if other.phase not in {sign.phase, "ended"} and _progress(other) < _progress(sign)
    ]
    return listed_ranks(behind) if behind else ""


def _progress(sign: Any) -> tuple[int, int]:
    return sign.collectives or 0, sign.step or 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


RANK_COLUMNS = (("rank", 0), ("host", 0), ("phase", 0), ("step", 40), ("share", 50), ("tok/s", 50))
MORE_RANK_COLUMNS = (("computes", 76), ("waited", 76), ("since", 100), ("waits for", 60))


def _ranks(run: WatchedRun, look: Look) -> list[ShownLine]:
    """A row for each rank; columns that do not fit are left out, the least needed first."""
    ranks = ranks_of(run)
    if not ranks:
        return []
    last = run.history.last_step or {}
    speed = _number(last.get("tokens_per_s"))
    header = [(name, least) for name, least in (*RANK_COLUMNS, *MORE_RANK_COLUMNS) if look.width >= least]
    rows = [[_rank_cell(each, name, speed) for name, _ in header] for each in ranks]
    widths = [max(len(name), *(len(row[place]) for row in rows)) for place, (name, _) in enumerate(header)]
    gap = "  " if look.width >= NARROW else " "
    head = gap.join(name.ljust(width) for (name, _), width in zip(header, widths, strict=True))
    lines: list[ShownLine] = [*_section("ranks", look), [(head, "dim")]]
    for each, row in zip(ranks, rows, strict=True):
        text = gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        is_shown = header[-1][0] == "waits for" and len(text) <= look.width
        text = text if is_shown or not each.waits_for else text.removesuffix(each.waits_for)
        lines.append([(text, "warn" if each.waits_for else "")])
        if each.waits_for and not is_shown:
            lines += _words(f"  waits for {each.waits_for}", "warn", look)
    if any(each.phase == "-" for each in ranks) and not run.record.ended:
        lines += _words(
            "phase -: its host agent did not say where it stands; the rest is of the last step", "dim", look
        )
    return lines


def _rank_cell(each: WatchedRank, name: str, speed: float | None) -> str:
    cells = {
        "rank": str(each.rank),
        "host": each.host,
        "phase": each.phase,
        "step": "-" if each.step is None else str(each.step),
        "share": "-" if each.share is None else f"{100 * each.share:.0f} %",
        "tok/s": "-" if each.share is None or speed is None else f"{speed * each.share:,.0f}".replace(",", " "),
        "computes": "-" if each.compute_s is None else f"{each.compute_s:.3f} s",
        "waited": "-" if each.wait_s is None else f"{each.wait_s:.3f} s",
        "since": "-" if each.same_s is None else f"{each.same_s:.1f} s",
        "waits for": each.waits_for,
    }
    return cells[name]


def _losses(run: WatchedRun, look: Look) -> list[ShownLine]:
    points = run.history.losses()
    if len(points) < 2 or look.width < 24:
        return []
    marks = run.history.evaluation_losses()
    rows = curve(points, marks=marks, width=min(look.width, 100), height=CURVE_ROWS, plain=look.plain)
    name = "loss (o: evaluation)" if marks else "loss"
    lines: list[ShownLine] = [[(row, "")] for row in rows]
    return [*_section(name, look), *lines] if rows else []


def _events(seen: WatchedState, run: WatchedRun, look: Look) -> list[ShownLine]:
    """The last events of the run and of its cards, and the findings that it started with."""
    steps = [
        (time, step)
        for step, record in run.history.steps.items()
        if (time := seconds_of(record.get("time"))) is not None
    ]
    cards = card_events([host.samples for host in seen.hosts if host.samples is not None], steps)
    told = [(seconds_of(record.get("time")) or 0.0, line) for record in run.events if (line := event_line(record))]
    shown = sorted([*told, *cards], key=lambda pair: pair[0])[-SHOWN_EVENTS:]
    lines: list[ShownLine] = _section("events", look) if shown or run.findings else []
    for time, line in shown:
        ago = f"{format_duration(max(0.0, seen.now - time))} ago" if time else ""
        lines += _words(f"{ago}  {line}" if ago else line, "", look)
    for finding in run.findings:
        if finding.get("severity") in {"fail", "warn"}:
            style: ShownStyle = "bad" if finding["severity"] == "fail" else "warn"
            hosts = ", ".join(str(name) for name in finding.get("hosts") or ())
            where = f"{hosts}: " if hosts else ""
            lines += _words(f"{finding['severity']} {finding.get('id')}  {where}{finding.get('title')}", style, look)
    return lines


# The same for programs.


def screen_json(seen: WatchedState) -> dict[str, Any]:
    """What the screen shows, as plain data. A figure that is not known is missing; times are seconds since 1970."""
    found: dict[str, Any] = {
        "time": round(seen.now, 3),
        "hosts": [_host_json(host) for host in seen.hosts],
        "totals": totals_of([host.facts for host in seen.hosts if host.facts is not None]).to_json(),
    }
    run = seen.run
    if run is None:
        return found
    record = run.record
    ranks = [{name: getattr(each, name) for name in WatchedRank.__dataclass_fields__} for each in ranks_of(run)]
    last = {name: value for name, value in (run.history.last_step or {}).items() if name != "ranks"}
    return {
        "run": record.id,
        "phase": record.phase,
        "silent": record.silent,
        "attempt": record.state.attempt if record.state else None,
        "last_step": last or None,
        "remaining_s": run.history.remaining_s(),
        "ranks": ranks,
        "evaluations": [{"step": int(step), "loss": loss} for step, loss in run.history.evaluation_losses()],
        "events": run.events[-SHOWN_EVENTS:],
        "findings": [dict(finding) for finding in run.findings],
        "gaps": list(run.gaps),
        **found,
    }


def _host_json(host: WatchedHost) -> dict[str, Any]:
    facts, samples = host.facts, host.samples
    return {
        "host": host.name,
        "heard": host.heard,
        "silent": host.silent or None,
        "cpu": host.cpu or None,
        "cpus": None if facts is None else facts.num_cpus,
        "memory_total_bytes": None if facts is None else facts.memory_total_bytes,
        "driver": None if facts is None else facts.gpu_driver.version,
        "cards": [dict(card) for card in samples.cards] if samples is not None else [],
        "figures": dict(samples.rows[-1][2]) if samples is not None and samples.rows else {},
        "events": [dict(event) for event in samples.events] if samples is not None else [],
    }

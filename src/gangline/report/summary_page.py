"""A report of headings, tables, curves and commands, as one self-contained HTML page and as Markdown with the same.

All texts may come from hosts, models and data sets: they are cleaned of control characters, and escaped for the format.
The page loads nothing and runs no script; its policy forbids both.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gangline.report.live import CurvePoint, curve
from gangline.report.text_table import clean

MOST_POINTS = 400
"""Of a curve; more are drawn as mean, least and most of as many stretches."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 220, 64, 24, 10
"""Of a curve, in units of its view box: outer size, and room for labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Rows below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageText:
    """A paragraph; or lines to paste or to read as they are, where `verbatim`."""

    lines: Sequence[str]
    verbatim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCurve:
    """A figure by step."""

    title: str
    points: Sequence[CurvePoint]
    marks: Sequence[CurvePoint] = ()
    """Single values over the curve, such as evaluations."""
    marks_name: str = ""
    breaks: Sequence[float] = ()
    """Steps with which a later attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShares:
    """Bars of parts that sum to one each."""

    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


Block = PageTable | PageText | PageCurve | PageShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is shown: blocks by the title of their section."""

    title: str
    sections: Mapping[str, Sequence[Block]] = field(default_factory=dict)


# Markdown.


def markdown(page: Page) -> str:
    """The page as Markdown, with curves as text."""
    lines = [f"# {_plain(page.title)}"]
    for title, blocks in page.sections.items():
        lines += ["", *markdown_section(title, blocks)]
    return "\n".join(lines) + "\n"


def markdown_section(title: str, blocks: Sequence[Block]) -> list[str]:
    """The lines of one section."""
    lines = [f"## {_plain(title)}"]
    for block in blocks:
        if shown := _markdown_block(block):
            lines += ["", *shown]
    return lines


def _markdown_block(block: Block) -> list[str]:
    if isinstance(block, PageTable):
        rule = "|".join(["---"] * len(block.header))
        return [_markdown_row(block.header), f"|{rule}|", *map(_markdown_row, block.rows)]
    if isinstance(block, PageShares):
        rows = [[name, *(f"{100 * part:.0f} %" for part in parts)] for name, parts in block.rows]
        return _markdown_block(PageTable(header=["", *block.names], rows=rows))
    if isinstance(block, PageCurve):
        chart = curve(block.points, marks=block.marks, width=90, plain=True)
        legend = f" (o: {_plain(block.marks_name)})" if block.marks else ""
        return [f"{_plain(block.title)}{legend}:", "", *_fenced(chart)] if chart else []
    return _fenced(block.lines) if block.verbatim else [_plain(line) for line in block.lines]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_inline, cells))} |"


def _fenced(lines: Sequence[str]) -> list[str]:
    """A block of code, whatever stands in it."""
    cleaned = [clean(line) for line in lines]
    longest = max((len(run) for line in cleaned for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *cleaned, fence]


def _plain(text: str) -> str:
    """A line of text that Markdown shows as it is."""
    return re.sub(r"^(\s*)(?=[#>+-]|\d+[.)]\s)", r"\1\\", _inline(text))


def _inline(text: str) -> str:
    """A text that Markdown shows as it is, but at the beginning of a line."""
    marks = r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    escaped = re.sub(marks, lambda found: f"\\{found[0]}", clean(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


# HTML.


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #656d76; --rule: #d0d7de; --shade: #f3f5f7;
  --line: #0b62c4; --band: #0b62c430; --mark: #bc4c00; --p0: #0b62c4; --p1: #8250df; --p2: #bc4c00; --p3: #1a7f37;
  --p4: #8c959f }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --rule: #3d444d;
  --shade: #161b22; --line: #4493f8; --band: #4493f840; --mark: #f0883e; --p0: #4493f8; --p1: #ab7df8; --p2: #f0883e;
  --p3: #3fb950; --p4: #6e7681 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--rule) }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: .8rem 0 }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; min-width: 3.5rem }
th { font-weight: 600; color: var(--faint); overflow-wrap: normal }
pre { background: var(--shade); padding: .7rem; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace }
figure { margin: 1.2rem 0 } figcaption { font-weight: 600 }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: var(--faint) }
.bar { display: flex; height: 1rem; min-width: 20rem } .bar span { display: block }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .9rem; vertical-align: -.1rem }
"""


def page_html(page: Page) -> str:
    """The page as one HTML document: no script, nothing to load, dark where the reader's system is."""
    body = [f"<h1>{_text(page.title)}</h1>"]
    for title, blocks in page.sections.items():
        body += [f"<section><h2>{_text(title)}</h2>", *(_html_block(block) for block in blocks), "</section>"]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(page.title)}</title><style>{_STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _text(text: str) -> str:
    return html.escape(clean(text))


def _html_block(block: Block) -> str:
    if isinstance(block, PageTable):
        head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in block.header)
        rows = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in block.rows]
        shown = f"<thead><tr>{head}</tr></thead>" if any(block.header) else ""
        return f"<table>{shown}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
    if isinstance(block, PageCurve):
        return _figure(block)
    if isinstance(block, PageShares):
        return _bars(block)
    if block.verbatim:
        return f"<pre>{_text_lines(block.lines)}</pre>"
    return f"<p>{_text_lines(block.lines)}</p>"


def _text_lines(lines: Sequence[str]) -> str:
    return "\n".join(map(_text, lines))


def _bars(block: PageShares) -> str:
    keys = [
        f'<span class="key" style="background: var(--p{place % 5})"></span>{_text(name)}'
        for place, name in enumerate(block.names)
    ]
    rows = []
    for label, parts in block.rows:
        words = ", ".join(f"{name} {100 * part:.0f} %" for name, part in zip(block.names, parts, strict=True))
        spans = [
            f'<span style="width: {100 * part:.2f}%; background: var(--p{place % 5})"></span>'
            for place, part in enumerate(parts)
        ]
        bar = f'<div class="bar" role="img" aria-label="{_text(words)}">{"".join(spans)}</div>'
        rows.append(f"<tr><td>{_text(label)}</td><td>{bar}</td><td>{_text(words)}</td></tr>")
    return f"<p>{''.join(keys)}</p><table><tbody>{''.join(rows)}</tbody></table>"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Neighbouring points of a curve, drawn as one."""

    x: float
    mean: float
    least: float
    most: float


def _stretches(points: Sequence[CurvePoint]) -> list[_Stretch]:
    each = max(1, math.ceil(len(points) / MOST_POINTS))
    found = []
    for first in range(0, len(points), each):
        xs, ys = zip(*points[first : first + each], strict=True)
        mean = sum(ys) / len(ys)
        found.append(_Stretch(x=sum(xs) / len(xs), mean=mean, least=min(ys), most=max(ys)))
    return found


def _figure(block: PageCurve) -> str:
    """A curve with its caption; nothing where it has no finite point."""
    if not (drawn := _drawn(block)):
        return ""
    key = f'<span class="key" style="background: var(--mark)"></span>{_text(block.marks_name)}' if block.marks else ""
    return f"<figure><figcaption>{_text(block.title)}{key}</figcaption>{drawn}</figure>"


def curve_svg(block: PageCurve) -> str:
    """A curve as an SVG file of its own, for pages that show pictures only; empty where it has no finite point."""
    colours = _STYLE.partition("body {")[0]
    style = f"<style>{colours} text {{ font: 11px system-ui, sans-serif; fill: var(--faint) }}</style>"
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>'
    tag, mark, rest = _drawn(block).partition(">")
    return f'{tag} xmlns="http://www.w3.org/2000/svg"{mark}{style}{paper}{rest}\n' if tag else ""


def _drawn(block: PageCurve) -> str:
    """A curve as SVG: the mean of each stretch over the band from its least to its most."""
    points = [point for point in block.points if math.isfinite(point[1])]
    marks = [mark for mark in block.marks if math.isfinite(mark[1])]
    if not points:
        return ""
    stretches = _stretches(points)
    xs = [point[0] for point in (*points, *marks)]
    ys = [point[1] for point in (*points, *marks)]
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))

    def x(value: float) -> float:
        return LEFT + (value - left) / ((right - left) or 1.0) * (WIDTH - LEFT - 12)

    def y(value: float) -> float:
        part = (value - low) / (high - low) if high > low else 0.5
        return HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)

    line = " ".join(f"{x(each.x):.1f},{y(each.mean):.1f}" for each in stretches)
    edge = [(each.x, each.most) for each in stretches] + [(each.x, each.least) for each in reversed(stretches)]
    band = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in edge)
    dots = [f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5" fill="var(--mark)"/>' for at, value in marks]
    breaks = [
        f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--faint)" '
        'stroke-dasharray="3 3"/>'
        for at in block.breaks
        if left <= at <= right
    ]
    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="var(--rule)"/>'
        f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        for value in _between(low, high)
    ]
    feet = [(left, "start", f"{left:g}"), (right, "end", f"step {right:g}")]
    ticks = [f'<text x="{x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{side}">{text}</text>' for at, side, text in feet]
    last = (
        f"{block.title}: {points[0][1]:.4g} at step {points[0][0]:g} to {points[-1][1]:.4g} at step {points[-1][0]:g}"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(last)}">{"".join((*grid, *ticks, *breaks))}'
        f'<polygon points="{band}" fill="var(--band)"/><polyline points="{line}" fill="none" stroke="var(--line)" '
        f'stroke-width="1.6"/>{"".join(dots)}</svg>'
    )


def _between(low: float, high: float) -> Iterator[float]:
    """Three values to label."""
    yield from (low, (low + high) / 2, high) if high > low else (low,)

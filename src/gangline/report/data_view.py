"""What `gangline data` shows of a preview: samples with what is learned in colour, lengths, what is cut or left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gangline.report.text_table import clean
from gangline.runs.gang import total_steps
from gangline.runs.job import Job

_COLOUR = ("\x1b[32m", "\x1b[0m")
"""Green: a word in it stays readable on light and on dark screens."""
_MARKS = ("⟦", "⟧")
_ASCII_MARKS = ("{{", "}}")
_BAR = 40


def marks(*, colour: bool, plain: bool) -> tuple[str, str]:
    """What stands around learned words: a colour, or brackets where there is none."""
    if colour:
        return _COLOUR
    return _ASCII_MARKS if plain else _MARKS


def preview_lines(seen: Mapping[str, Any], job: Job, *, around: tuple[str, str]) -> Iterator[str]:
    """The whole page. Text of rows is cleaned of control sequences; `around` is not. See `worker.data.preview.look`."""
    for sample in seen["samples"]:
        yield from _sample(sample, around)
    if seen["samples"]:
        yield f"Learned words stand in {'colour' if around == _COLOUR else ' '.join(around)}."
        yield ""
    yield from _lengths(seen, job.data.sequence_length)
    yield from summary_lines(seen, job)


def summary_lines(seen: Mapping[str, Any], job: Job) -> Iterator[str]:
    """How many rows, samples and steps, and what is cut or left out: the page in short, for a plan."""
    rows, skipped = seen["rows"], seen["skipped"]
    of_all = "all rows" if seen["whole"] else f"the first {_share(seen)} of the rows"
    learned = f", {seen['learned_tokens'] / seen['tokens']:.0%} of them learned" if seen["tokens"] else ""
    yield f"rows       {rows:,} ({of_all}), {seen['tokens']:,} tokens{learned}"
    samples, steps = seen["num_samples"], seen["steps"]
    about = ""
    if not seen["whole"] and seen["read_bytes"]:
        about, samples = "about ", round(samples * seen["total_bytes"] / seen["read_bytes"])
        steps = total_steps(samples, job.batch, epochs=job.epochs, steps=job.steps)
    packed = "packed" if job.data.packing else "one row each"
    length = f"{about}{steps:,} steps of {job.batch}"
    if job.steps is None and job.epochs:
        length += f" in {job.epochs:g} epoch{'' if job.epochs == 1 else 's'}"
    yield f"samples    {about}{samples:,} of at most {job.data.sequence_length:,} tokens, {packed}; {length}"
    if seen["truncated"]:
        yield f"cut        {_rows(seen['truncated'])} longer than a sample, cut at its end (data.overlong: truncate)"
        yield from (f"             {place}: {tokens:,} tokens" for place, tokens in seen["too_long"][:3])
    if seen["dropped"]:
        yield f"dropped    {_rows(seen['dropped'])} longer than a sample, by the job or with nothing left to learn"
    if "sequence_length" in job.open:
        length = f"{job.data.sequence_length:,}"
        yield f"length     counted with samples of {length} tokens; gangline plan chooses the length"
    for note, count in sorted(seen["notes"].items()):
        yield f"left out   {_rows(count)}: {note}"
    if skipped:
        rule = "left out (data.skip_bad_rows)" if job.data.skip_bad_rows else "which stops the start"
        yield f"unusable   {_rows(skipped)}, {rule}:"
        yield from (f"             {clean(line)}" for line in seen["bad_rows"])
    if seen["fits"]:
        yield f"fix        the rows fit {clean(seen['fits'])}"


def _sample(sample: Mapping[str, Any], around: tuple[str, str]) -> Iterator[str]:
    cut = f", {sample['left_out']:,} more cut off" if sample["left_out"] else ""
    yield f"── {clean(sample['place'])}: {sample['tokens']:,} tokens, {sample['learned']:,} learned{cut}"
    begin, end = around
    text = ""
    for words, learned in sample["parts"]:
        said = clean(words, keep_newlines=True)
        # line by line, so that a pager or a copied line has its marks, too
        text += "\n".join(f"{begin}{line}{end}" if line else line for line in said.split("\n")) if learned else said
    yield from text.split("\n")
    yield ""


def _lengths(seen: Mapping[str, Any], limit: int) -> Iterator[str]:
    bars: Sequence[Sequence[int]] = seen["bars"]
    if not bars:
        return
    most = max(count for _, _, count in bars)
    width = max(len(f"{high:,}") for _, high, _ in bars)
    yield f"tokens of a row (a sample has {limit:,}):"
    for low, high, count in bars:
        yield f"  {low:>{width},} to {high:>{width},}  {'#' * -(-count * _BAR // most):<{_BAR}} {count:,}"
    named = {0: "shortest", 50: "median", 100: "longest"}
    yield "  " + ", ".join(f"{named.get(each, f'{each} %')} {tokens:,}" for each, tokens in seen["percentiles"])
    yield ""


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _share(seen: Mapping[str, Any]) -> str:
    return f"{seen['read_bytes'] / seen['total_bytes']:.1%}" if seen["total_bytes"] else "part"

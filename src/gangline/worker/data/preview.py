"""`python -m gangline.worker preview <job.json> --rows N --seconds S`: rows as the model will see them.

Rows of `data.train` go through the very steps of a token set, as many as S seconds allow, and nothing is written. One
JSON line {"kind": "result", ...} on stdout, as `look` describes it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gangline.formats import fitting_format
from gangline.row_files import ReadPosition
from gangline.runs.gang import total_steps
from gangline.runs.job import NO_TOKENS, Job
from gangline.worker.data.build import Fitter, RowTally, fill, plan_sets
from gangline.worker.data.model_folder import DigestCache, Hub, HuggingFace, ModelFolder, open_model_folder
from gangline.worker.data.prepare import load_tokenizer_of, tooling_of
from gangline.worker.data.tokenise import Encoded
from gangline.worker.data.tokenizer_file import TokenizerFile
from gangline.worker.data.tokens import pack
from gangline.worker.json_lines import write_line

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
NUM_BARS = 12


@dataclass(slots=True)
class LengthsOnly:
    """In place of a token set's writer: how long every row of a sample is, and how much of it is learned."""

    limit: int
    tokens: array[int] = field(default_factory=lambda: array("q"))
    labels: array[int] = field(default_factory=lambda: array("q"))
    _open: int = 0

    def add(self, ids: Sequence[int], learned: bytearray) -> None:
        """A document that fits into a sample."""
        self.tokens.append(len(ids))
        self.labels.append(sum(learned[1:]))

    def add_text(self, ids: Sequence[int], *, continues: bool = False) -> None:
        """A document of which all is learned, or the next piece of one that `continues`; a long one becomes several."""
        self._open += len(ids)
        while self._open > self.limit:
            self._row(self.limit, labels=self.limit)
        if not continues:
            self._row(self._open, labels=self._open - 1)

    def _row(self, length: int, *, labels: int) -> None:
        self._open -= length
        self.tokens.append(length)
        self.labels.append(max(0, labels))

    def samples(self, *, packed: bool) -> tuple[int, int]:
        """(tokens, samples) of the rows that have something to learn."""
        lengths = np.frombuffer(self.tokens, dtype=np.int64)[np.frombuffer(self.labels, dtype=np.int64) > 0]
        if not packed or not len(lengths):
            return int(lengths.sum()), len(lengths)
        return int(lengths.sum()), int(pack(lengths, self.limit).max()) + 1


def preview_main(argv: list[str]) -> int:
    """One JSON line; raises GanglineError for the caller to report."""
    parser = argparse.ArgumentParser(prog="gangline.worker preview")
    parser.add_argument("job", type=Path)
    parser.add_argument("--rows", type=int, default=3, help="rows to show")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for all other rows")
    words = parser.parse_args(argv)
    write_line("result", **look(Job.load(words.job), num_shown=words.rows, seconds=words.seconds))
    return 0


def look(job: Job, *, num_shown: int, seconds: float, hub: Hub | None = None) -> dict[str, Any]:
    """What becomes of the rows of `data.train`. Raises DataError, ModelError.

    samples: [{place, parts: [[text, learned]], tokens, learned, left_out}]; rows, skipped, bad_rows (the first of
    them); fits (where none can be used, the words of a job that would fit them); truncated; dropped (nothing left
    to learn, or `overlong: drop`); too_long: [[place, tokens]] of the first of these; notes: what the chat template
    left out -> rows; whole: all rows were looked at, else read_bytes of total_bytes; percentiles: [[percent,
    tokens]] and bars: [[from, to, rows]] of the rows' lengths; num_samples, tokens, learned_tokens, steps, of what
    was looked at.
    """
    hub, folder = hub or HuggingFace(), open_model_folder(job.model)
    tokenizer, by = _tokenizer(job, folder)
    tooling = tooling_of(job, folder, tokenizer)
    request = plan_sets(job, tokenizer_digest="", vocab_size=folder.vocab_size, cache=_Unhashed(), hub=hub)[0]
    watch, lengths = _Watch(num_shown, job.data.sequence_length), LengthsOnly(job.data.sequence_length)
    fitter, tally, position = Fitter(lengths, job.data, see=watch.see), RowTally(), ReadPosition()
    rows = _until(request.rows(tooling.format, hub, position), watch, time.monotonic() + seconds)
    fill(fitter, request, tooling, tally, rows=rows)
    tokens, num_samples = lengths.samples(packed=job.data.packing)
    return {
        "samples": [_shown(tokenizer, encoded, job.data.sequence_length) for encoded in watch.shown],
        "rows": tally.rows,
        "skipped": tally.bad.count,
        "bad_rows": tally.bad.examples,
        "fits": "" if watch.lengths else fitting_format(tally.bad.values, preferred=job.data.format),
        "truncated": fitter.num_truncated,
        "dropped": fitter.num_dropped,
        "too_long": watch.too_long,
        "notes": dict(watch.notes),
        "whole": not watch.stopped,
        "read_bytes": position.done_bytes,
        "total_bytes": request.num_bytes,
        "percentiles": watch.percentiles(),
        "bars": watch.bars(),
        "num_samples": num_samples,
        "tokens": tokens,
        "learned_tokens": int(sum(lengths.labels)),
        "steps": total_steps(num_samples, job.batch, epochs=job.epochs, steps=job.steps) if num_samples else 0,
        "tokenizer": by,
    }


def _tokenizer(job: Job, folder: ModelFolder) -> tuple[Any, str]:
    """The tokenizer, and what read it."""
    if not job.model.trust_remote_code and job.tokens == NO_TOKENS and (folder.path / "tokenizer.json").is_file():
        try:
            return TokenizerFile(folder.path), "tokenizers"
        except (OSError, ValueError, KeyError, TypeError):
            pass  # transformers may know an older form of the files, or says what is wrong with them
    return load_tokenizer_of(job, folder), "transformers"


class _Unhashed(DigestCache):
    """In place of hashes of files, which are the names of token sets: none is made here."""

    def __init__(self) -> None:
        super().__init__(Path("unused"))

    def digest(self, path: Path) -> str:
        """Nothing."""
        return str(path)


@dataclass(slots=True)
class _Watch:
    """What goes by on its way to the writer."""

    num_shown: int
    limit: int
    shown: list[Encoded] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    too_long: list[list[Any]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    stopped: bool = False
    _open: int = 0

    def see(self, encoded: Encoded) -> None:
        """A document, or a piece of one."""
        if len(self.shown) < self.num_shown:
            self.shown.append(encoded)
        self.notes.update(encoded.document.notes)
        self._open += len(encoded.ids)
        if encoded.document.continues:
            return
        if self._open > self.limit and len(self.too_long) < NUM_BARS:
            self.too_long.append([encoded.document.row.place, self._open])
        self.lengths.append(self._open)
        self._open = 0

    def percentiles(self) -> list[list[int]]:
        """Tokens that so many percent of the rows do not exceed."""
        ordered = sorted(self.lengths)
        return [[each, ordered[max(0, -(-each * len(ordered) // 100) - 1)]] for each in PERCENTILES if ordered]

    def bars(self) -> list[list[int]]:
        """Rows by length, in steps of equal width."""
        if not self.lengths:
            return []
        low, high = min(self.lengths), max(self.lengths)
        width = max(1, -(-(high - low + 1) // NUM_BARS))
        counts = Counter((length - low) // width for length in self.lengths)
        return [[low + index * width, low + (index + 1) * width - 1, counts[index]] for index in range(max(counts) + 1)]


def _until(rows: Iterator[Any], watch: _Watch, deadline: float) -> Iterator[Any]:
    for row in rows:
        yield row
        if time.monotonic() > deadline:
            watch.stopped = True
            return


def _shown(tokenizer: Any, encoded: Encoded, limit: int) -> dict[str, Any]:
    """A row as the model sees it: the text of its tokens, in stretches of learned and other ones."""
    ids, learned = encoded.ids[:limit], encoded.learned[:limit]
    parts: list[list[Any]] = []
    for bit, run in itertools.groupby(range(len(ids)), key=lambda at: learned[at]):
        parts.append([tokenizer.decode([ids[at] for at in run]), bool(bit)])
    row = encoded.document.row
    left_out = len(encoded.ids) - len(ids)
    return {"place": row.place, "parts": parts, "tokens": len(ids), "learned": sum(learned), "left_out": left_out}

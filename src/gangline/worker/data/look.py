"""Looks at rows before a start: `look-tables` reads tables of columns, `look-lengths` tokenises a sample.

Each reads JSON from stdin and writes JSON lines on stdout, last {"kind": "result", ...}.

look-tables   {"format", "fields", "speakers", "learned", "files", "rows": slice or null, "limit": rows at the most or
              null}; the result is `RowCheck.to_json` of these files, and "start" and "at": the numbers of the row
              before the first that was taken, and of the last
look-lengths  {"job", "rows"}, rows as `SampleRow.to_json` with their `part` of data.train; the result is
              {"lengths": [[tokens, tokens before the first learned one, whether it is one of the evenly spread]],
              "longest": [[place, tokens]], "refused": [places and reasons], "num_refused"}
"""

from __future__ import annotations

import heapq
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gangline.errors import DataError
from gangline.formats import FORMATS, MEDIA, PREFERENCE, RowError
from gangline.row_check import Chosen, RowCheck, SampleRow
from gangline.row_files import SHOWN_BAD_ROWS, BadRow, BadRows, ReadPosition, file_kind, place
from gangline.runs.job import Job, SliceJob, row_edges
from gangline.worker.data.row_formats import Format
from gangline.worker.data.rows import count_rows, first_filled, read_files
from gangline.worker.json_lines import write_line


def tables_main(_argv: list[str]) -> int:
    """`look-tables`; see the module."""
    asked = json.load(sys.stdin)
    check = RowCheck(asked["format"], asked["fields"], asked["speakers"], asked["learned"])
    columns = PREFERENCE.union(asked["fields"].values())
    rows = SliceJob(**asked["rows"]) if asked["rows"] else None
    try:
        chosen = Chosen(*row_edges(rows, asked["limit"], lambda: sum(map(count_rows, asked["files"]))))
    except DataError:
        chosen = Chosen()  # a file that cannot be read is told below
    for file in asked["files"]:
        check.take_all(chosen.take(read_files((file,), columns=columns, passages=False, position=ReadPosition())))
    if FORMATS[asked["format"]].conversations and not check.broken:
        check.broken += _about_media(asked["files"], MEDIA.difference(asked["fields"].values()))
    check.end()
    # a column may hold what JSON does not know; the shape was checked before
    sys.stdout.write(
        json.dumps({"kind": "result", **check.to_json(), "at": chosen.at, "start": chosen.start}, default=str) + "\n"
    )
    return 0


def _about_media(files: Sequence[str], columns: frozenset[str]) -> Iterator[DataError]:
    """Conversations about images in tables, of which only the columns that are needed are read otherwise."""
    for file in filter(lambda file: file_kind(file) in {"parquet", "arrow"}, files):
        if found := first_filled(file, columns):
            yield DataError(
                f"{place(file, found[0], 'row')}: {found[1]!r} belongs to the conversation; gangline trains on text",
                seen=f"a column {found[1]!r} that is not empty",
                fix="leave the column out, if the text alone is to be learned",
            )


def lengths_main(_argv: list[str]) -> int:
    """`look-lengths`; see the module. Raises ModelError or DataError where there is no tokenizer."""
    # transformers goes without torch for what is asked here, and is there four seconds sooner
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # imported here: `look-tables` does not need them
    from gangline.worker.data.build import check_ids
    from gangline.worker.data.model_folder import open_model_folder
    from gangline.worker.data.prepare import load_tooling

    asked = json.load(sys.stdin)
    job = Job.from_json(asked["job"])
    folder = open_model_folder(job.model)
    tooling = load_tooling(job, folder)
    formats = [Format.of(job.data.of(part), tooling.format.render) for part in job.data.train.parts]
    lengths: list[list[Any]] = []
    places: list[tuple[int, str]] = []
    refused = BadRows()
    for record in asked["rows"]:
        sample = SampleRow.from_json(record)
        try:
            format_ = formats[record["part"]]
            documents = list(format_.documents(sample.row, format_.values(sample.row)))
            encoded = tooling.encoder.encode(documents)
        except RowError as error:
            row = sample.row
            refused.add(BadRow(file=row.file, number=row.number, reason=str(error), unit=row.unit))
            continue
        for each in encoded:
            check_ids(each.ids, tooling.vocab_size, sample.row)
            first = each.learned.find(1, 1)
            places.append((len(each.ids), sample.row.place))
            lengths.append([len(each.ids), first if first > 0 else len(each.ids), sample.is_spread])
    write_line(
        "result",
        lengths=lengths,
        longest=[[place, length] for length, place in heapq.nlargest(SHOWN_BAD_ROWS, places)],
        refused=refused.examples,
        num_refused=refused.count,
    )
    return 0

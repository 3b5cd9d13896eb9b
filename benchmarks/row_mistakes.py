"""Mistakes in rows, each planted in 100,000 of them: is it named with its file and row, how soon, and is nothing left?

    python -m benchmarks.row_mistakes [--rows N] [--only WORD] [--commands] [--to FILE]

Each case appends one line of JSON to the file: whether the mistake was named, the seconds of the look (wall, and of
processors), the limit, and the words. --commands: the whole command `gangline train` besides, in an empty home, with
its exit code and what `gangline ps` lists afterwards.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.context import REAL, Dependencies
from gangline.decide.row_report import look_at_rows
from gangline.errors import DataError
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob

PLANTED = 0.777
"""Where in the file the mistake is."""
LIMIT_S, SLOW_LIMIT_S = 2.0, 5.0
"""For 100,000 rows; the second where they are compressed, or a JSON array."""

COMPLETION = {
    "prompt": "a question of some words, number {n}?",
    "completion": "an answer to it, of some more words: {n}.",
}
CHAT = {"messages": [{"role": "user", "content": "hello {n}"}, {"role": "assistant", "content": "good day {n}"}]}
INSTRUCTION = {"instruction": "add the numbers", "input": "{n} and 1", "output": "one more than {n}"}
TEXT = {"text": "a line of text about number {n}, and a few words more"}
ROWS: dict[str, dict[str, Any]] = {"completion": COMPLETION, "chat": CHAT, "instruction": INSTRUCTION, "text": TEXT}

Spoil = Callable[[list[bytes], int], bytes]
"""(good rows as lines, index of the one to spoil) -> the content of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mistake."""

    name: str
    ending: str
    spoil: Spoil
    expected: str
    """Words of the error."""
    format: str = "completion"
    fields: dict[str, str] = field(default_factory=dict)
    row: bool = True
    """The error names the row that is spoilt; otherwise the file."""
    first: bool = False
    """The mistake is at the beginning of the file, or in all of it."""

    @property
    def limit_s(self) -> float:
        """How long the look may take."""
        return LIMIT_S if self.ending in {".jsonl", ".csv", ".tsv", ".parquet", ".txt"} else SLOW_LIMIT_S


def good_rows(format_: str, num_rows: int) -> list[bytes]:
    """Rows of a format as lines of JSON."""
    text = json.dumps(ROWS[format_])
    return [text.replace("{n}", str(number)).encode() + b"\n" for number in range(num_rows)]


# How to spoil a file.


def line(new: bytes | Callable[[bytes], bytes]) -> Spoil:
    """Another line in the place of a good one."""

    def spoil(lines: list[bytes], at: int) -> bytes:
        lines[at] = new(lines[at]) if callable(new) else new + b"\n"
        return b"".join(lines)

    return spoil


def row(**values: Any) -> Spoil:
    """Other values in a row; `...` takes a column away."""

    def change(old: bytes) -> bytes:
        changed = {**json.loads(old), **values}
        return json.dumps({name: value for name, value in changed.items() if value is not ...}).encode() + b"\n"

    return line(change)


def whole(change: Callable[[bytes], bytes]) -> Spoil:
    """The whole file, changed."""
    return lambda lines, _at: change(b"".join(lines))


def array(inner: Spoil, change: Callable[[bytes], bytes] = lambda data: data) -> Spoil:
    """The lines as one JSON array."""

    def spoil(lines: list[bytes], at: int) -> bytes:
        rows = inner(lines, at).rstrip(b"\n").replace(b"\n", b",\n")
        return change(b"[\n" + rows + b"\n]\n")

    return spoil


def table(change: Callable[[list[str], int], None], *, header: str = "prompt,completion") -> Spoil:
    """The lines as csv, with cells in quotes."""

    def spoil(lines: list[bytes], at: int) -> bytes:
        cells = [json.loads(each) for each in lines]
        found = [header, *(",".join(f'"{value}"' for value in each.values()) for each in cells)]
        change(found, at + 1)
        return "\n".join(found).encode("utf-8", "surrogateescape") + b"\n"

    return spoil


def cell_line(text: str) -> Spoil:
    """Another line of csv in the place of a good one."""

    def change(found: list[str], at: int) -> None:
        found[at] = text

    return table(change)


def head(text: str) -> Spoil:
    """Another first line of csv."""

    def change(found: list[str], _at: int) -> None:
        found[0] = text

    return table(change)


def packed(pack: Callable[[bytes], bytes], inner: Spoil, change: Callable[[bytes], bytes] = lambda data: data) -> Spoil:
    """The content compressed, and then changed."""
    return lambda lines, at: change(pack(inner(lines, at)))


def cut(data: bytes) -> bytes:
    """The first three quarters of it."""
    return data[: len(data) * 3 // 4]


def flip(data: bytes) -> bytes:
    """A bit of it flipped, behind the middle."""
    at = len(data) * 3 // 4
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def columns(change: Callable[[dict[str, list[Any]], int], None] | None = None, *, kind: str = "parquet") -> Spoil:
    """The rows as a table of columns, changed."""

    def spoil(lines: list[bytes], at: int) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        rows = [json.loads(each) for each in lines]
        found = {name: [each[name] for each in rows] for name in rows[0]}
        if change is not None:
            change(found, at)
        sink = io.BytesIO()
        made = pa.table(found)
        if kind == "parquet":
            parquet.write_table(made, sink)
        else:
            with pa.ipc.new_file(sink, made.schema) as writer:
                writer.write_table(made)
        return sink.getvalue()

    return spoil


def column(name: str, value: Any) -> Callable[[dict[str, list[Any]], int], None]:
    """One value of a column."""

    def change(found: dict[str, list[Any]], at: int) -> None:
        found[name][at] = value

    return change


def every(name: str, make: Callable[[str], Any] | None) -> Callable[[dict[str, list[Any]], int], None]:
    """All values of a column; None takes it away."""

    def change(found: dict[str, list[Any]], _at: int) -> None:
        values = found.pop(name)
        if make is not None:
            found[name] = [make(value) for value in values]

    return change


def zstd(data: bytes) -> bytes:
    """Compressed by zstd, which takes pyarrow here."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    packed_bytes: bytes = sink.getvalue().to_pybytes()
    return packed_bytes


def message(*messages: Any) -> Spoil:
    """Other messages in a row."""
    return row(messages=list(messages))


SAME: Spoil = whole(lambda data: data)
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "good day"}


def jsonl(name: str, spoil: Spoil, expected: str, **more: Any) -> Case:
    """A mistake in a file of JSON lines."""
    return Case(name=f"jsonl: {name}", ending=".jsonl", spoil=spoil, expected=expected, **more)


CASES: tuple[Case, ...] = (
    jsonl("a line that is cut", line(lambda old: old[:20] + b"\n"), "not JSON"),
    jsonl("single quotes", line(b"{'prompt': 'a', 'completion': 'b'}"), "not JSON"),
    jsonl("a comma too many", line(lambda old: old.replace(b"}\n", b",}\n")), "not JSON"),
    jsonl("a line break within a text", line(lambda old: old.replace(b" words", b"\nwords", 1)), "not JSON"),
    jsonl("two objects on a line", line(lambda old: old.strip() + old), "not JSON"),
    jsonl("a comment", line(b"# half of it"), "not JSON"),
    jsonl("a list in the place of an object", line(b'["a", "b"]'), "a JSON list"),
    jsonl("a text in the place of an object", line(b'"a question"'), "a JSON str"),
    jsonl("a number", line(b"17"), "a JSON int"),
    jsonl("a column is missing", row(completion=...), "no field 'completion'"),
    jsonl("a column is called otherwise", row(completion=..., answer="b"), "did you mean data.fields"),
    jsonl("null", row(completion=None), "'completion' is null"),
    jsonl("a number in the place of a text", row(prompt=3), "'prompt' is a int"),
    jsonl("a list in the place of a text", row(completion=["a"]), "'completion' is a list"),
    jsonl("an empty answer", row(completion=""), "'completion' is empty"),
    jsonl("half a surrogate pair", line(b'{"prompt": "a \\ud83d", "completion": "b"}'), "half a surrogate pair"),
    jsonl("latin-1", line("{'prompt': 'a', 'completion': 'é'}".replace("'", '"').encode("latin-1")), "not UTF-8"),
    jsonl("a block of NUL", line(b"\0" * 64), "not JSON"),
    jsonl("a NUL in a text", line(b'{"prompt": "a\\u0000", "completion": "b"}'), "NUL"),
    jsonl("UTF-16", whole(lambda data: data.decode().encode("utf-16")), "not UTF-8", first=True),
    jsonl("an empty file", whole(lambda _data: b""), "no rows", row=False),
    jsonl("blank lines alone", whole(lambda _data: b"\n\n\n"), "no rows", row=False),
    jsonl("one pretty object", whole(lambda _data: b'{\n "data": []\n}\n'), "one JSON object", row=False),
    jsonl("no such column at all", SAME, "no field 'question'", fields={"prompt": "question"}, first=True),
    jsonl("chat: no assistant", message(HELLO), "no assistant message", format="chat"),
    jsonl("chat: no messages", message(), "is not a list of messages", format="chat"),
    jsonl("chat: messages as a text", row(messages="hello"), "messages", format="chat"),
    jsonl("chat: messages as an object", row(messages=HELLO), "not a list of messages", format="chat"),
    jsonl("chat: a message that is a text", message("hello"), "message 1", format="chat"),
    jsonl("chat: no role", message({"content": "hello"}), "has no role", format="chat"),
    jsonl("chat: no content", message(HELLO, {"role": "assistant"}), "no content", format="chat"),
    jsonl("chat: a number as content", message(HELLO, {"role": "assistant", "content": 3}), "content", format="chat"),
    jsonl("chat: a role mistyped", message(HELLO, {"role": "asistant", "content": "b"}), "assistant", format="chat"),
    jsonl("chat: an image", row(messages=[HELLO, ANSWER], images=["a.png"]), "'images' belongs", format="chat"),
    jsonl(
        "chat: a part that is an image",
        message({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, ANSWER),
        "the type 'image_url'; gangline trains on text",
        format="chat",
    ),
    jsonl(
        "chat: preferences",
        row(messages=..., chosen=[HELLO, ANSWER], rejected=[HELLO]),
        "a row of preferences",
        format="chat",
    ),
    jsonl("preferences", row(completion=..., chosen="a", rejected="b"), "of preferences"),
    jsonl("instruction: no output", row(output=...), "no field 'output'", format="instruction"),
    jsonl("instruction: an empty output", row(output=""), "'output' is empty", format="instruction"),
    jsonl("instruction: a number as input", row(input=4), "'input' is a int", format="instruction"),
    jsonl("text: a list", row(text=["a"]), "'text' is a list", format="text"),
    jsonl("text: another column", row(text=..., content="a"), "did you mean data.fields", format="text"),
    Case(name="json: a row that is a list", ending=".json", spoil=array(line(b"[1]")), expected="a JSON list"),
    Case(name="json: a column is missing", ending=".json", spoil=array(row(prompt=...)), expected="no field 'prompt'"),
    Case(name="json: an empty answer", ending=".json", spoil=array(row(completion="")), expected="is empty"),
    Case(name="json: broken in a row", ending=".json", spoil=array(line(b'{"prompt" "a"}')), expected="not JSON"),
    Case(name="json: cut", ending=".json", spoil=array(SAME, cut), expected="not JSON, in row", row=False),
    Case(
        name="json: words after the array",
        ending=".json",
        spoil=array(SAME, lambda data: data + b"end\n"),
        expected="nothing after the array",
        row=False,
    ),
    Case(name="csv: a cell too few", ending=".csv", spoil=cell_line('"a"'), expected="1 cells, but 2 columns"),
    Case(name="csv: a cell too many", ending=".csv", spoil=cell_line('"a","b","c"'), expected="3 cells"),
    Case(name="csv: an empty answer", ending=".csv", spoil=cell_line('"a",""'), expected="is empty"),
    Case(name="csv: a name twice", ending=".csv", spoil=head("prompt,prompt"), expected="twice", first=True),
    Case(name="csv: no names", ending=".csv", spoil=head(""), expected="no names of columns", first=True),
    Case(name="csv: other names", ending=".csv", spoil=head("q,a"), expected="no field 'prompt'", row=False),
    Case(name="csv: latin-1", ending=".csv", spoil=cell_line('"a","\udce9"'), expected="not UTF-8"),
    Case(name="csv: a NUL", ending=".csv", spoil=cell_line('"a","b\0"'), expected="NUL"),
    Case(name="csv: an open quote", ending=".csv", spoil=cell_line('"a","b'), expected="not csv"),
    Case(name="csv: empty", ending=".csv", spoil=whole(lambda _data: b""), expected="no names of columns", first=True),
    Case(name="tsv: commas", ending=".tsv", spoil=head("prompt,completion"), expected="not csv", row=False),
    Case(
        name="gz: cut", ending=".jsonl.gz", spoil=packed(gzip.compress, SAME, cut), expected="cannot be read", row=False
    ),
    Case(name="gz: a flipped bit", ending=".jsonl.gz", spoil=packed(gzip.compress, SAME, flip), expected="", row=False),
    Case(name="gz: not compressed", ending=".jsonl.gz", spoil=SAME, expected="cannot be read", row=False),
    Case(name="gz: null", ending=".jsonl.gz", spoil=packed(gzip.compress, row(prompt=None)), expected="is null"),
    Case(name="csv.gz: ragged", ending=".csv.gz", spoil=packed(gzip.compress, cell_line('"a"')), expected="1 cells"),
    Case(name="bz2: cut", ending=".jsonl.bz2", spoil=packed(bz2.compress, SAME, cut), expected="cannot", row=False),
    Case(name="xz: cut", ending=".jsonl.xz", spoil=packed(lzma.compress, SAME, cut), expected="cannot", row=False),
    Case(name="zst: cut", ending=".jsonl.zst", spoil=packed(zstd, SAME, cut), expected="cannot", row=False),
    Case(name="zst: null", ending=".jsonl.zst", spoil=packed(zstd, row(prompt=None)), expected="is null"),
    Case(name="text: latin-1", ending=".txt", spoil=line(b"\xe9"), expected="not UTF-8", format="text"),
    Case(name="text: with another format", ending=".txt", spoil=SAME, expected="is plain text", row=False),
    Case(
        name="parquet: cut", ending=".parquet", spoil=lambda a, b: cut(columns()(a, b)), expected="parquet", row=False
    ),
    Case(name="parquet: JSON lines", ending=".parquet", spoil=SAME, expected="not a readable parquet", row=False),
    Case(name="parquet: null", ending=".parquet", spoil=columns(column("prompt", None)), expected="is null"),
    Case(name="parquet: an empty answer", ending=".parquet", spoil=columns(column("completion", "")), expected="empty"),
    Case(
        name="parquet: no column",
        ending=".parquet",
        spoil=columns(every("prompt", None)),
        expected="no field",
        first=True,
    ),
    Case(
        name="parquet: numbers", ending=".parquet", spoil=columns(every("prompt", len)), expected="is a int", first=True
    ),
    Case(
        name="parquet: bytes",
        ending=".parquet",
        spoil=columns(every("prompt", str.encode)),
        expected="bytes",
        first=True,
    ),
    Case(
        name="parquet: chat without an assistant",
        ending=".parquet",
        spoil=columns(column("messages", [HELLO])),
        expected="no assistant message",
        format="chat",
    ),
    Case(name="arrow: null", ending=".arrow", spoil=columns(column("prompt", None), kind="arrow"), expected="is null"),
    Case(
        name="arrow: cut", ending=".arrow", spoil=lambda a, b: cut(columns(kind="arrow")(a, b)), expected="", row=False
    ),
)


def write_case(case: Case, folder: Path, *, num_rows: int) -> tuple[Job, str]:
    """The file of a case, as a job reads it, and the place of the mistake as an error names it."""
    at = int(num_rows * PLANTED)
    path = folder / f"rows{case.ending}"
    path.write_bytes(case.spoil(good_rows(case.format, num_rows), at))
    is_csv = case.ending.startswith((".csv", ".tsv"))
    is_line = case.ending.startswith((".jsonl", ".txt")) or is_csv
    number = 1 if case.first else at + 1 + is_csv
    place = f"{path}:{number}" if is_line else f"{path} row {number}"
    if case.name == "json: broken in a row":
        place = f"{path}:{at + 2}"  # the bracket has a line of its own
    source = SourceJob(files=(str(path),))
    data = DataJob(train=source, format=case.format, fields=case.fields)
    job = Job(name="rows", model=ModelJob(path="/nowhere"), data=data, batch=8, micro_batch=1)
    return job, place if case.row else str(path)


def words_of(job: Job, deps: Dependencies = REAL) -> str:
    """The error that a look at the rows of a job ends with; "" for none."""
    try:
        look_at_rows(job, (), deps).require(job)
    except DataError as error:
        return str(error)
    return ""


def measured(case: Case, folder: Path, *, num_rows: int) -> dict[str, Any]:
    """The record of one case."""
    job, place = write_case(case, folder, num_rows=num_rows)
    begun_s, used_s = time.perf_counter(), _used_s()
    words = words_of(job)
    wall_s, cpu_s = time.perf_counter() - begun_s, _used_s() - used_s
    return {
        "case": case.name,
        "rows": num_rows,
        "named": bool(words) and case.expected in words and place in words,
        "wall_s": round(wall_s, 2),
        "processor_s": round(cpu_s, 2),
        "limit_s": case.limit_s,
        "load": round(os.getloadavg()[0], 1),
        "words": words.replace(f"{folder}/", ""),
    }


def _used_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


JOB = """
model: {{path: {model}, start: random}}
data: {{train: {file}, format: {format}, fields: {fields}}}
batch: 8
steps: 2
"""


def by_command(case: Case, folder: Path, *, num_rows: int) -> dict[str, Any]:
    """What `gangline train` says, and what `gangline ps` lists afterwards."""
    job, place = write_case(case, folder, num_rows=num_rows)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    words = JOB.format(model=model, file=job.data.train.files[0], format=case.format, fields=json.dumps(case.fields))
    (folder / "job.yaml").write_text(words, encoding="utf-8")
    env = {**os.environ, "GANGLINE_HOME": str(folder / "home")}
    begun_s = time.perf_counter()
    train = _gangline(env, folder, "train", "job.yaml")
    wall_s = time.perf_counter() - begun_s
    listed = json.loads(_gangline(env, folder, "ps", "--json").stdout)
    return {
        "command_named": case.expected in train.stderr and Path(place).name in train.stderr,
        "command_s": round(wall_s, 2),
        "exit_code": train.returncode,
        "runs": len(listed["runs"]),
    }


def _gangline(env: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gangline.cli.main", *words]
    return subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 1 where a mistake was not named."""
    parser = argparse.ArgumentParser(prog="benchmarks.row_mistakes", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("row_mistakes.jsonl"))
    words = parser.parse_args(argv)
    missed = 0
    for case in CASES:
        if words.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as name, words.to.open("a", encoding="utf-8") as stream:
            record = measured(case, Path(name), num_rows=words.rows)
            if words.commands:
                record |= by_command(case, Path(name), num_rows=words.rows)
            stream.write(json.dumps(record) + "\n")
        missed += not record["named"]
        sys.stdout.write(f"{'named ' if record['named'] else 'MISSED'} {record['wall_s']:6.2f} s  {case.name}\n")
        sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

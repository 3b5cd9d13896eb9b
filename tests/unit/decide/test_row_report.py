"""Mistakes in rows are named with file and row before anything is built, and nobody stops for what is stated by a rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.row_mistakes import CASES, Case, words_of, write_case
from gangline.context import Dependencies
from gangline.decide.row_report import RowsReport, look_at_rows, settled_length, with_lengths
from gangline.errors import DataError, RunFailed
from gangline.runs.cluster import Host
from gangline.runs.job import DataJob, Job, LearnJob, ModelJob, SliceJob, SourceJob

HERE = [case for case in CASES if case.ending not in {".parquet", ".arrow", ".jsonl.zst"}]
"""What the controller reads by itself; the others take packages (tests/process/decide)."""


def refusing(_host: Host, verb: str, _asked: Mapping[str, Any]) -> dict[str, Any]:
    raise RunFailed(f"{verb}: nobody looks", seen="no package")


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_a_planted_mistake_is_named_with_its_file_and_row(tmp_path: Path, case: Case) -> None:
    job, place = write_case(case, tmp_path, num_rows=60)
    words = words_of(job, Dependencies(ask_look=refusing))
    assert case.expected in words
    assert place in words


def job_of(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> Job:
    """A completion job over these rows, with the length of its samples open."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = DataJob(train=SourceJob(files=(str(path),)), **{"format": "completion", **data})
    model = ModelJob(path=str(tmp_path))
    return Job(name="rows", model=model, data=given, batch=8, micro_batch=1, open=("sequence_length",))


GOOD = {"prompt": "a", "completion": "b"}
BAD = {"prompt": "a", "completion": ""}


def look(job: Job) -> RowsReport:
    return look_at_rows(job, (), Dependencies(ask_look=refusing))


def test_all_mistakes_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    job = job_of(tmp_path, [GOOD, BAD])
    other = tmp_path / "eval.jsonl"
    other.write_text("{\n", encoding="utf-8")
    evaluation = SourceJob(files=(str(other),))
    job = Job(**{**vars_of(job), "data": DataJob(**{**vars_of(job.data), "evaluation": evaluation})})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 'completion' is empty") as caught:
        look(job).require(job)
    assert "eval.jsonl: one JSON object" in caught.value.what


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_rows_may_be_skipped_where_some_are_good_and_that_is_offered_only_then(tmp_path: Path) -> None:
    job = job_of(tmp_path, [GOOD, BAD])
    with pytest.raises(DataError) as caught:
        look(job).require(job)
    assert "skip_bad_rows" in caught.value.fix
    skipping = job_of(tmp_path, [GOOD, BAD], skip_bad_rows=True)
    look(skipping).require(skipping)
    assert "1 of them cannot be used" in "\n".join(look(skipping).lines(skipping))
    for given in ({}, {"skip_bad_rows": True}):
        hopeless = job_of(tmp_path, [BAD, BAD], **given)
        with pytest.raises(DataError) as caught:
            look(hopeless).require(hopeless)
        assert "skip_bad_rows" not in caught.value.fix


def cut_job(folder: Path, rows: list[dict[str, Any]], source: dict[str, Any], **data: Any) -> Job:
    """A job that takes a part of these rows, which lie in two files."""
    job = job_of(folder, rows[:4], **data)
    other = folder / "more.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[4:]), encoding="utf-8")
    files = (*job.data.train.files, str(other))
    train = SourceJob(files=files, **source)
    return Job(**{**vars_of(job), "data": DataJob(**{**vars_of(job.data), "train": train})})


@pytest.mark.parametrize(
    ("source", "data", "taken"),
    [
        ({"max_samples": 3}, {}, range(3)),
        ({}, {"max_samples": 5}, range(5)),
        ({"rows": SliceJob(start=2, stop=6)}, {}, range(2, 6)),
        ({"rows": SliceJob(start=2), "max_samples": 3}, {"max_samples": 9}, range(2, 5)),
        ({"rows": SliceJob(stop=30, percent=True)}, {}, range(3)),
        ({"rows": SliceJob(start=-3)}, {}, range(7, 10)),
        ({"rows": SliceJob(start=-5), "max_samples": 2, "weight": 2.5}, {}, range(5, 7)),
    ],
)
def test_of_a_source_the_rows_that_the_job_takes_are_looked_at_and_no_others(
    tmp_path: Path, source: dict[str, Any], data: dict[str, Any], taken: range
) -> None:
    good_inside = [GOOD if number in taken else BAD for number in range(10)]
    job = cut_job(tmp_path, good_inside, source, **data)
    report = look(job)
    report.require(job)
    said = (
        f"data.train: {len(taken)} looked at ({taken.start + 1} to {taken.stop}, which the job takes), all can be used"
    )
    assert report.lines(job) == [f"rows       {said}"]
    assert len(report.sources[0].sample) == len(taken)
    for at in (taken.start, taken.stop - 1):
        one_bad = [GOOD if number != at else BAD for number in range(10)]
        job = cut_job(tmp_path, one_bad, source, **data)
        with pytest.raises(DataError, match=f"1 of {len(taken)} rows cannot be used"):
            look(job).require(job)


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ({"max_samples": 3}, {"shuffle": True}),
        ({}, {"max_samples": 3, "deduplicate": True}),
        ({"weight": 0.5}, {}),
    ],
)
def test_where_rows_are_chosen_otherwise_all_are_looked_at_and_a_bad_one_may_be_left_out(
    tmp_path: Path, source: dict[str, Any], data: dict[str, Any]
) -> None:
    job = cut_job(tmp_path, [GOOD] * 9 + [BAD], source, **data)
    report = look(job)
    report.require(job)
    (line,) = report.lines(job)
    assert "10 looked at, 1 of them cannot be used; the job takes a part of these rows only" in line


def test_a_slice_behind_the_last_row_is_named(tmp_path: Path) -> None:
    job = cut_job(tmp_path, [GOOD] * 10, {"rows": SliceJob(start=10, stop=20)})
    with pytest.raises(DataError, match="no rows in the part of") as caught:
        look(job).require(job)
    assert "it has 10 rows" in caught.value.seen


def test_a_slice_that_ends_behind_the_part_that_is_read_in_full_is_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.decide.row_reader.WHOLE_BYTES", 1000)
    job = job_of(tmp_path, [GOOD] * 900 + [BAD], max_samples=800)
    (source,) = look(job).sources
    assert (source.is_cut, source.taken) == (True, None)
    ends_before = job_of(tmp_path, [GOOD] * 900 + [BAD], max_samples=20)
    (source,) = look(ends_before).sources
    assert (source.is_cut, source.taken, source.num_rows, source.unread) == (False, (0, 20), 20, ())


def test_a_conversation_without_an_assistant_is_good_where_others_are_learned(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hello"}]}]
    job = job_of(tmp_path, rows, format="chat", learn=LearnJob(roles=("user",)))
    look(job).require(job)
    with pytest.raises(DataError, match="no tool message"):
        look(job := job_of(tmp_path, rows, format="chat", learn=LearnJob(roles=("tool",)))).require(job)


def test_what_nobody_can_read_is_said_and_stops_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path, [GOOD])
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"PAR1")
    gone = str(tmp_path / "gone.jsonl")
    train = SourceJob(files=(str(table), gone, *job.data.train.files))
    job = Job(**{**vars_of(job), "data": DataJob(**{**vars_of(job.data), "train": train})})
    report = look(job)
    report.require(job)
    said = "\n".join(report.lines(job))
    assert "rows.parquet: look-tables: nobody looks; no package" in said or "no Python of this computer" in said
    assert "gone.jsonl is not on this computer" in said
    assert "data.train: 1 looked at, all can be used" in said


def test_behind_the_part_that_is_read_in_full_lines_of_a_sample_are_named_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, [GOOD] * 600 + [BAD] * 400)
    monkeypatch.setattr("gangline.decide.row_reader.WHOLE_BYTES", 1000)
    report = look(job)
    (source,) = report.sources
    assert 256 <= source.num_rows < 1000
    numbers = [int(text.split(":")[1]) for text in source.examples]
    assert numbers
    assert all(600 < number <= 1000 for number in numbers)
    assert "but for 200 lines of it" in "\n".join(report.lines(job))


Lengths = list[tuple[int, int, bool]]


def seen(lengths: Lengths) -> Callable[..., dict[str, Any]]:
    """What a process with the packages says of rows with so many tokens, and so many before the first learned one."""
    longest = sorted(
        ([f"rows.jsonl:{at}", tokens] for at, (tokens, *_) in enumerate(lengths, 1)), key=lambda row: row[1]
    )
    answer = {"lengths": lengths, "longest": longest[::-1][:10], "refused": [], "num_refused": 0}
    return lambda _host, _verb, _asked: answer


def settled(job: Job, lengths: Lengths, **config: Any) -> tuple[Job, RowsReport]:
    deps = Dependencies(ask_look=seen(lengths))
    host = Host(name="pc1", workdir="/x", python="/elsewhere/python")
    (Path(job.model.path) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return settled_length(job, with_lengths(look_at_rows(job, (host,), deps), job, (host,), deps), {})


def test_samples_are_as_long_as_99_percent_of_the_rows_and_the_plan_says_why(tmp_path: Path) -> None:
    lengths: Lengths = [(100 + number, 50, True) for number in range(1, 100)] + [(900, 50, True)]
    job, report = settled(job_of(tmp_path, [GOOD] * 100), lengths)
    assert (job.data.sequence_length, job.open) == (256, ())
    said = "\n".join(report.lines(job))
    assert "sequence_length 256: 99 % of 100 rows have 199 tokens or fewer, the longest has 900" in said
    assert "1 of 100 rows have more than 256 tokens and are truncated" in said
    assert "dropped" not in said


@pytest.mark.parametrize(("max_positions", "length"), [(512, 512), (None, 4096), (32768, 4096)])
def test_samples_are_no_longer_than_the_model_reads_nor_than_4096(
    tmp_path: Path, max_positions: int | None, length: int
) -> None:
    job, report = settled(job_of(tmp_path, [GOOD]), [(9000, 50, True)], max_position_embeddings=max_positions)
    assert job.data.sequence_length == length
    assert "sequence_length" in "\n".join(report.lines(job))


def test_texts_are_split_so_that_their_length_does_not_count(tmp_path: Path) -> None:
    rows = [{"text": "words"}]
    job, _ = settled(job_of(tmp_path, rows, format="text"), [(9000, 1, True)])
    assert job.data.sequence_length == 1024
    short, _ = settled(job_of(tmp_path, rows, format="text"), [(9000, 1, True)], n_positions=512)
    assert short.data.sequence_length == 512


def test_where_nothing_is_known_of_the_tokens_samples_have_1024_and_the_plan_says_so(tmp_path: Path) -> None:
    job = job_of(tmp_path, [GOOD])
    deps = Dependencies(ask_look=refusing)
    job, report = settled_length(job, with_lengths(look_at_rows(job, (), deps), job, (), deps), {})
    assert job.data.sequence_length == 1024
    said = "\n".join(report.lines(job))
    assert "tokens     not looked at: " in said
    assert "sequence_length 1024: the default; nothing is known" in said


def test_a_length_that_the_job_says_stays_and_rows_that_do_not_fit_are_dropped_and_told(tmp_path: Path) -> None:
    job = Job(**{**vars_of(job_of(tmp_path, [GOOD] * 3, sequence_length=64)), "open": ()})
    job, report = settled(job, [(40, 20, True), (90, 30, True), (90, 70, True)])
    report.require(job)
    assert job.data.sequence_length == 64
    said = "\n".join(report.lines(job))
    assert "2 of 3 rows have more than 64 tokens and are truncated" in said
    assert "1 of these: the prompt alone fills the sample" in said


def test_rows_that_are_too_long_are_told_though_none_of_the_rows_that_are_spread_evenly_is(tmp_path: Path) -> None:
    job = Job(**{**vars_of(job_of(tmp_path, [GOOD] * 2000, sequence_length=64)), "open": ()})
    job, report = settled(job, [(40, 20, True), (90, 30, False), (80, 30, False), (64, 30, False)])
    said = "\n".join(report.lines(job))
    assert "longer     at least 2 of all rows have more than 64 tokens and are truncated; the longest has 90" in said


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a computer with `pip install gangline` alone."""
    monkeypatch.setattr("gangline.decide.row_reader.importlib.util.find_spec", lambda _name: None)


def test_without_packages_here_a_python_of_this_computer_looks_and_none_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_packages(monkeypatch)
    asked: list[str] = []

    def ask(host: Host, _verb: str, _asked: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(host.name)
        return seen([(40, 20, True)])(host, _verb, _asked)

    deps, job = Dependencies(ask_look=ask), job_of(tmp_path, [GOOD])
    there = Host(name="far", workdir="/x", python="/far/python", transport="ssh")
    here = Host(name="near", workdir="/x", python="/near/python", transport="local")
    report = with_lengths(look_at_rows(job, (there,), deps), job, (there,), deps)
    assert asked == []
    assert "tokens     not looked at: no Python of this computer has the packages" in "\n".join(report.lines(job))
    report = with_lengths(look_at_rows(job, (there, here), deps), job, (there, here), deps)
    assert asked == ["near"]
    assert report.lengths is not None


def test_a_start_stops_where_no_row_fits_and_where_the_job_wants_every_row_to(tmp_path: Path) -> None:
    job = Job(**{**vars_of(job_of(tmp_path, [GOOD], sequence_length=64)), "open": ()})
    with pytest.raises(DataError, match="no token to learn") as caught:
        settled(job, [(90, 70, True)])[1].require(job)
    assert "raise data.sequence_length" in caught.value.fix
    strict = Job(**{**vars_of(job_of(tmp_path, [GOOD], sequence_length=64, overlong="fail")), "open": ()})
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has 90 tokens"):
        settled(strict, [(90, 30, True)])[1].require(strict)
    all_fit, _ = settled(job_of(tmp_path, [GOOD], overlong="fail"), [(90, 30, True), (600, 30, True)])
    assert all_fit.data.sequence_length == 640


def test_the_sample_of_a_source_is_always_the_same_and_has_its_longest_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * (5000 if number == 3333 else 1)} for number in range(7000)]
    first, second = (look(job_of(tmp_path, rows)).sources[0].sample for _ in range(2))
    assert [each.row.number for each in first] == [each.row.number for each in second]
    assert 1000 <= sum(each.is_spread for each in first) <= 2000
    assert 3334 in {each.row.number for each in first}


SHARE_GPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("given", "row", "fits"),
    [
        ("text", {"prompt": "a", "completion": "b"}, "data.format: completion or chat"),
        ("chat", {"text": "a"}, "data.format: text"),
        ("text", {"instruction": "a", "input": "", "output": "b"}, "data.format: instruction, alpaca or chat"),
        ("text", {"messages": TURNS, "prompt": "hi", "id": 7}, "data.format: chat"),
        ("completion", {"prompt": TURNS[:1], "completion": TURNS[1:]}, "data.format: chat"),
        (
            "text",
            {"question": "a", "answer": "b"},
            "data.format: completion or chat with data.fields: {prompt: question, completion: answer}",
        ),
        (
            "instruction",
            {"question": "a", "answer": "b"},
            "data.format: instruction with data.fields: {instruction: question, output: answer}",
        ),
        (
            "text",
            SHARE_GPT,
            (
                "data.format: chat with data.fields: {messages: conversations, role: from, content: value} "
                "and data.roles: {human: user, gpt: assistant}"
            ),
        ),
    ],
)
def test_rows_of_another_format_are_told_the_words_that_fit_them(
    tmp_path: Path, given: str, row: dict[str, Any], fits: str
) -> None:
    job = job_of(tmp_path, [row, row], format=given)
    with pytest.raises(DataError, match="2 of 2 rows cannot be used") as caught:
        look(job).require(job)
    assert caught.value.fix == f"the rows fit {fits}"


def test_no_format_is_offered_that_does_not_read_all_rows_or_reads_little_of_them(tmp_path: Path) -> None:
    for rows in (
        [{"prompt": "a", "completion": "b"}, {"completion": "b"}],
        [{"context": "a", "question": "b", "answers": []}],
        [{"prompt": "a", "completion": ""}],
    ):
        job = job_of(tmp_path, rows, format="text")
        with pytest.raises(DataError) as caught:
            look(job).require(job)
        assert caught.value.fix == "mend the rows, data.format or data.fields"

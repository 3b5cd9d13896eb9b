"""Records on disk: their version, what a newer or older build makes of them, and what is wrong with a damaged one."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gangline.errors import RecordError
from gangline.runs import old_format, record_versions
from gangline.runs.decode import DecodeError, build
from gangline.runs.gang import Gang, GangRank
from gangline.runs.record_versions import load_record, write_record


def a_gang() -> Gang:
    return Gang(run_id="calm-otter-7", attempt=1, ranks=(GangRank(host="pc1", share=2),))


def place(folder: Path, run_id: str = "calm-otter-7") -> Path:
    path = folder / f"runs/{run_id}/attempts/1/gang.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_record_says_its_version_and_its_run(tmp_path: Path) -> None:
    path = place(tmp_path)
    a_gang().save(path)
    said = json.loads(path.read_text())
    assert (said["schema_version"], said["run_id"]) == ("1.0", "calm-otter-7")
    assert Gang.load(path) == a_gang()


def test_an_older_build_passes_over_the_keys_of_a_newer_minor_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path)
    value = a_gang().to_json()
    value["ranks"][0]["watts"] = 700
    with monkeypatch.context() as newer:
        newer.setattr(record_versions, "SCHEMA_VERSION", (1, 3))
        write_record(path, {**value, "topology": "ring"})
    assert Gang.load(path) == a_gang()
    assert json.loads(path.read_text())["topology"] == "ring"


def test_a_newer_build_reads_an_older_minor_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place(tmp_path)
    a_gang().save(path)
    monkeypatch.setattr(record_versions, "SCHEMA_VERSION", (1, 9))
    assert Gang.load(path) == a_gang()


def test_a_newer_major_version_is_refused_with_a_clear_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(record_versions, "SCHEMA_VERSION", (2, 0))
        a_gang().save(path)
    with pytest.raises(RecordError) as raised:
        Gang.load(path)
    assert str(path) in raised.value.what
    assert "expected version 1.x, found 2.0" in raised.value.seen
    assert "upgrade gangline" in raised.value.fix


def test_an_unknown_key_of_this_version_is_damage(tmp_path: Path) -> None:
    path = place(tmp_path)
    write_record(path, {**a_gang().to_json(), "wrlod_size": 4})
    with pytest.raises(RecordError, match="is damaged") as raised:
        Gang.load(path)
    assert "wrlod_size" in raised.value.seen


def test_the_record_of_another_run_is_refused(tmp_path: Path) -> None:
    path = place(tmp_path)
    a_gang().save(path)
    other = place(tmp_path, "bold-elk-2")
    other.write_bytes(path.read_bytes())
    with pytest.raises(RecordError) as raised:
        Gang.load(other)
    assert "it belongs to the run calm-otter-7, not to bold-elk-2" in raised.value.seen


def test_the_old_format_is_translated_by_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_format, "FILES", {"agent.json": "guard.json"})
    monkeypatch.setattr(old_format, "ITEMS", {"agent.json": ("hosts", "seat", "slot"), "gang.json": ("ranks", "x", "")})
    old = {"pid": 7, "hosts": [{"seat": 1, "name": "pc1"}]}
    (tmp_path / "guard.json").write_text(json.dumps(old))
    assert load_record(tmp_path / "agent.json", dict) == {"pid": 7, "hosts": [{"slot": 1, "name": "pc1"}]}
    (tmp_path / "gang.json").write_text(json.dumps({"ranks": [{"x": 1, "share": 2}]}))
    assert load_record(tmp_path / "gang.json", dict) == {"ranks": [{"share": 2}]}
    write_record(tmp_path / "agent.json", {"hosts": [{"seat": 1}]})
    assert load_record(tmp_path / "agent.json", dict) == {"hosts": [{"seat": 1}]}  # of now: nothing is translated


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] | None = None
    pair: tuple[int, str] | None = None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"inner": [{"count": "two"}]}, "inner[0].count: expected int, found 'two'"),
        ({"inner": [{"count": True}]}, "inner[0].count: expected int, found True"),
        ({"inner": [{}]}, "inner[0].count is missing"),
        ({"inner": 7}, "inner: expected a list, found 7"),
        ({"by_name": {"a": {"count": 1, "ratio": "x"}}}, "by_name.a.ratio: expected float, found 'x'"),
        ({"pair": [1]}, "pair: expected 2 values, found [1]"),
        ({"pair": [1, 2]}, "pair[1]: expected str, found 2"),
        ({"outer": 1}, "Outer: unknown keys outer"),
        ([], "the record: expected the keys of Outer, found []"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(data: object, said: str) -> None:
    with pytest.raises(DecodeError) as raised:
        build(Outer, data)
    assert str(raised.value) == said


def test_a_whole_number_is_a_float() -> None:
    assert build(Inner, {"count": 1, "ratio": 2}) == Inner(count=1, ratio=2)


class NeedsStack:
    """Garbage that only a collection finds, and whose end calls functions."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        deeper(20)


def deeper(times: int) -> int:
    return times and deeper(times - 1)


def test_a_record_that_is_nested_too_deep_has_nothing_else_end_without_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path)
    path.write_bytes(b'{"a":' * 100_000)
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: failed.append(said.exc_type))
    before = gc.get_threshold()
    try:
        for objects in range(600, 1000, 5):  # until a collection begins at every depth up to the deepest
            gc.collect()
            gc.set_threshold(objects)
            NeedsStack()
            with pytest.raises(RecordError):
                load_record(path, Gang)
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert failed == []
    assert gc.isenabled()

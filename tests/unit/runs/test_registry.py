"""Runs have short human ids, and any unique prefix finds them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import ADJECTIVES, NOUNS, PATTERN, RunLayout, new_id
from gangline.runs.record_versions import load_record, write_record
from gangline.runs.registry import find_run, list_runs, read_record, renew_keys
from gangline.runs.state import Phase, ProcessId, RunState


def make_run(
    home: Path,
    run_id: str,
    created: str = "2026-01-01T00:00:00.000Z",
    *,
    phase: Phase = "finished",
    supervisor: ProcessId | None = None,
) -> None:
    layout = RunLayout(home, run_id)
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", created=created, phase=phase, supervisor=supervisor).save(layout)


def test_an_id_is_an_adjective_a_noun_and_a_number() -> None:
    assert PATTERN.fullmatch(new_id(set(), Random(1)))


def test_words_are_unique_and_plain() -> None:
    for words in (ADJECTIVES, NOUNS):
        assert len(words) == len(set(words)) >= 70
        assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_an_id_in_use_is_never_given_again() -> None:
    taken: set[str] = set()
    dice = Random(3)
    for _ in range(2000):
        fresh = new_id(taken, dice)
        assert fresh not in taken
        taken.add(fresh)


def test_a_home_full_of_short_numbers_still_yields_ids() -> None:
    taken = {f"{adjective}-{noun}-{number}" for adjective in ADJECTIVES for noun in NOUNS for number in range(1, 10)}
    assert new_id(taken, Random(5)) not in taken


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7", "2026-01-01T00:00:00.000Z")
    make_run(tmp_path, "bold-wren-2", "2026-03-01T00:00:00.000Z")
    (tmp_path / "runs" / ".trash").mkdir()
    assert [record.id for record in list_runs(tmp_path)] == ["bold-wren-2", "calm-otter-7"]


def test_a_run_with_a_torn_state_is_listed_as_unknown(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7")
    RunLayout(tmp_path, "calm-otter-7").state.write_text("{", encoding="utf-8")
    assert list_runs(tmp_path)[0].phase == "unknown"


def test_a_unique_prefix_is_enough(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7")
    make_run(tmp_path, "bold-wren-2")
    assert find_run(tmp_path, "ca").run_id == "calm-otter-7"


def test_a_whole_id_wins_over_longer_ones(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7")
    make_run(tmp_path, "calm-otter-71")
    assert find_run(tmp_path, "calm-otter-7").run_id == "calm-otter-7"


def test_an_ambiguous_prefix_names_the_candidates(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7")
    make_run(tmp_path, "calm-owl-1")
    with pytest.raises(UsageError, match="ambiguous") as caught:
        find_run(tmp_path, "calm")
    assert "calm-otter-7 and calm-owl-1" in caught.value.seen


@pytest.mark.parametrize("prefix", ["x", "", "../calm-otter-7", "calm-otter-7/"])
def test_an_unknown_prefix_names_what_there_is(tmp_path: Path, prefix: str) -> None:
    make_run(tmp_path, "calm-otter-7")
    make_run(tmp_path, "calm-owl-1")
    with pytest.raises(UsageError, match="no such run") as caught:
        find_run(tmp_path, prefix)
    assert "calm-otter-7" in caught.value.seen
    assert "gangline ps" in caught.value.fix


def test_an_empty_home_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path / "absent", "x")
    assert "train" in caught.value.fix


def test_a_running_run_whose_supervisor_is_gone_is_lost(tmp_path: Path) -> None:
    me = ProcessId.current()
    gone = ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1)
    make_run(tmp_path, "calm-otter-7", phase="running", supervisor=me)
    make_run(tmp_path, "bold-wren-2", phase="running", supervisor=gone)
    make_run(tmp_path, "tidy-elk-3", phase="finished", supervisor=gone)
    phases = {run_id: read_record(RunLayout(tmp_path, run_id)).phase for run_id in ("calm-otter-7", "bold-wren-2")}
    assert phases == {"calm-otter-7": "running", "bold-wren-2": "lost"}
    assert read_record(RunLayout(tmp_path, "tidy-elk-3")).phase == "finished"


def test_a_new_host_key_is_put_in_for_a_witness_too(tmp_path: Path) -> None:
    make_run(tmp_path, "calm-otter-7")
    hosts = [Host(name=name, workdir="/g", python="", host_key=f"ssh-ed25519 {name}") for name in ("pc1", "nas")]
    cluster = Cluster(name="home", hosts=(hosts[0],), witness=hosts[1])
    write_record(RunLayout(tmp_path, "calm-otter-7").cluster, cluster.to_json())
    assert renew_keys(tmp_path, {"ssh-ed25519 nas": "ssh-ed25519 new"}) == ["calm-otter-7"]
    renewed = load_record(RunLayout(tmp_path, "calm-otter-7").cluster, Cluster)
    assert [each.host_key for each in renewed.reached] == ["ssh-ed25519 pc1", "ssh-ed25519 new"]

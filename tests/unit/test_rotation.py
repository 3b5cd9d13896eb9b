"""Every test of a matrix has its day."""

from pathlib import Path
from types import SimpleNamespace

from tests import rotation


def item(name, *markers):
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda wanted: wanted if wanted in markers else None)


def test_a_test_of_a_matrix_is_run_in_one_turn_of_all_and_others_in_every_one():
    matrix = [item(f"test_all.py::test_each[{number}]", "rotating") for number in range(60)]
    plain = [item(f"test_all.py::test_plain[{number}]", "train") for number in range(9)]
    turns = [rotation.divide([*matrix, *plain], turn) for turn in range(rotation.PARTS)]
    for run, rest in turns:
        assert all(each in run for each in plain)
        assert len(run) + len(rest) == 69
        assert 10 < len(run) - len(plain) < 30
    assert all(sum(each in run for run, _ in turns) == 1 for each in matrix)


def test_a_day_has_one_turn_for_all_processes(monkeypatch):
    monkeypatch.setenv(rotation.TURN, "0")  # put back what was there, whatever it was
    monkeypatch.delenv(rotation.TURN)
    monkeypatch.delenv("CI", raising=False)
    first = rotation.take_turn()
    assert rotation.os.environ[rotation.TURN] == str(first)
    monkeypatch.setenv(rotation.TURN, str(first + 1 + rotation.PARTS))
    assert rotation.take_turn() == (first + 1) % rotation.PARTS


def test_ci_runs_every_case(monkeypatch):
    cases = [item("test_all.py::test_each", "rotating"), item("test_all.py::test_plain")]
    monkeypatch.setenv(rotation.TURN, "all")
    assert rotation.divide(cases, rotation.take_turn()) == (cases, [])
    monkeypatch.delenv(rotation.TURN)
    monkeypatch.setenv("CI", "true")
    assert rotation.take_turn() is None
    assert "export GANGLINE_TURN=all" in (Path(__file__).parents[2] / ".ci/run").read_text()

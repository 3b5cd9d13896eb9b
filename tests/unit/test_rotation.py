"""Every test of a matrix has its day."""

import re
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


ROOT = Path(__file__).parents[2]
APART = ("PREPARE", "LAUNCHERS", "RAY", "STRATEGIES", "METHODS", "USE", "MEASURE", "KERNELS", "CONTAINERS", "TRACKERS")
"""In the Makefile: what `make test` leaves out, by the name of the verb that has it."""


def files_of(name: str) -> list[str]:
    """The files of one list of the Makefile, as make has them."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    words = re.search(rf"^{name} := (.*)$", text, re.MULTILINE)[1]
    found = []
    for prefix, names in re.findall(r"\$\(addprefix (\S+?),([^)]*)\)", words):
        found += [prefix + each for each in names.split()]
    for pattern in re.findall(r"\$\(wildcard ([^)]*)\)", words):
        found += [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
    return found + re.sub(r"\$\([^)]*\)", "", words).split()


def test_what_the_tests_leave_out_another_verb_has_and_ci_runs_it():
    listed = [path for name in APART for path in files_of(name)]
    assert len(listed) == len(set(listed)) > len(APART)
    assert [path for path in listed if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    left_out = re.search(r"^APART := \$\(addprefix --ignore=,(.*)\)$", makefile, re.MULTILINE)[1]
    assert left_out.split() == [f"$({name})" for name in APART]
    verbs = [name.lower() for name in APART]
    assert f"for verb in {' '.join(verbs)}; do" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for verb, name in zip(verbs, APART, strict=True):
        assert re.search(rf"^{verb}: .*\n\t.* \$\({name}\)$", makefile, re.MULTILINE), verb

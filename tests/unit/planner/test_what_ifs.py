"""The answers to questions.yaml: right by arithmetic made by hand, and whole screens as they were read.

A question that is not right yet stands in not_yet.yaml, which only shrinks: one that has become
right has to leave it, by `python -m tests.unit.planner.what_ifs --write`.
"""

from __future__ import annotations

import functools
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gangline.planner.decision import Choice
from gangline.planner.report import GIB
from tests.unit.planner.what_ifs import GOLDEN, NOT_YET, QUESTIONS, USUAL, Answer, Question, ask, golden


@functools.cache
def _asked(number: int) -> Answer:
    question = QUESTIONS[number]
    with tempfile.TemporaryDirectory() as folder:
        return ask(question.on(USUAL), question.plan, Path(folder) / question.id)


def _against(question: Question, other: Mapping[str, Any]) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        words = other.get("plan", question.plan)
        return ask(question.on(USUAL, other.get("job")), words, Path(folder) / question.id)


def _row(answer: Answer, kind: str) -> dict[str, Any]:
    rows = {row["strategy"]["kind"]: row for row in answer.verdict["strategies"]}
    assert kind in rows, f"{kind} was not weighed: {', '.join(rows)}"
    return rows[kind]


def _need_gib(row: Mapping[str, Any]) -> float:
    return max(rank["memory"]["process"]["likely"] for rank in row["ranks"]) / GIB


def _within(value: float, bounds: Sequence[float], what: str) -> None:
    low, high = bounds
    assert low <= value <= high, f"{what}: {value:.4g}, expected {low:g} to {high:g}"


def _per_sample_s(choice: Choice | None) -> float:
    """Of the best; fails where nothing fits."""
    best = None if choice is None else choice.best
    assert best is not None, "nothing fits"
    return best.seconds / best.samples


def _choice(answer: Answer) -> Choice | None:
    return None if answer.prediction is None else answer.prediction.job_forecast.choice


# The keys of `expect`.


def fits(_: Question, answer: Answer, value: bool) -> None:
    """Whether anything fits."""
    assert (answer.verdict["best"] is not None) == value, f"expected {value}"
    assert answer.exit_code == (0 if value else 6), f"exit code {answer.exit_code}"


def exit_code(_: Question, answer: Answer, value: int) -> None:
    assert answer.exit_code == value


def strategy(_: Question, answer: Answer, value: list[str]) -> None:
    """The one that is taken, of some that are right."""
    kind = answer.verdict["best"]["strategy"]["kind"]
    assert kind in value, f"{kind}, expected {value}"


def row_fits(_: Question, answer: Answer, value: dict[str, bool]) -> None:
    """Strategies that fit, and ones that do not."""
    found = {kind: _row(answer, kind)["fits"] for kind in value}
    assert found == value, f"{found}, expected {value}"


def need_gib(_: Question, answer: Answer, value: dict[str, list[float]]) -> None:
    """Of the rank that needs most, of a strategy."""
    for kind, bounds in value.items():
        _within(_need_gib(_row(answer, kind)), bounds, f"GiB of {kind}")


def same_need(question: Question, answer: Answer, value: dict[str, Any]) -> None:
    """With another job the best needs as much."""
    other = _against(question, {"job": value})
    assert _need_gib(other.verdict["best"]) == pytest.approx(_need_gib(answer.verdict["best"]), rel=0.01)


def free_gib(_: Question, answer: Answer, value: list[float]) -> None:
    """That a rank of the best may take."""
    _within(min(rank["free_bytes"] for rank in answer.verdict["best"]["ranks"]) / GIB, value, "GiB free")


def exchange_s(_: Question, answer: Answer, value: dict[str, list[float]]) -> None:
    """Seconds of all exchanges of a step, of a strategy."""
    for kind, bounds in value.items():
        _within(_row(answer, kind)["step"]["communication_s"], bounds, f"seconds of exchanges of {kind}")


def hours(question: Question, answer: Answer, value: list[float]) -> None:
    """Of the whole run."""
    steps = question.on(USUAL)["steps"]
    _within(steps * answer.verdict["best"]["step"]["total_s"] / 3600, value, "hours")


def change(_: Question, answer: Answer, value: list[float]) -> None:
    """How many times as fast with the change as without."""
    before = None if answer.prediction is None else answer.prediction.before
    _within(_per_sample_s(before) / _per_sample_s(_choice(answer)), value, "times as fast with the change")


def against(question: Question, answer: Answer, value: list[dict[str, Any]]) -> None:
    """Speed in samples per second over that of other machines, or of another job."""
    for other in value:
        times = _per_sample_s(_choice(_against(question, other))) / _per_sample_s(_choice(answer))
        _within(times, other["times"], f"times as fast as {other.get('plan', other.get('job'))}")


def says(_: Question, answer: Answer, value: list[str]) -> None:
    missing = [text for text in value if text not in answer.words]
    assert not missing, f"{missing} in {answer.screen}"


def never(_: Question, answer: Answer, value: list[str]) -> None:
    found = [text for text in value if text in answer.words]
    assert not found, f"{found} in {answer.screen}"


def _ways(answer: Answer) -> list[str]:
    return [" and ".join(way["changes"]) for way in answer.verdict["instead"]]


def first_way(_: Question, answer: Answer, value: list[str]) -> None:
    """The first way out has one of these words, if there is a need for one."""
    if answer.verdict["best"] is None:
        assert any(text in way for way in _ways(answer)[:1] for text in value), _ways(answer)


def never_first(_: Question, answer: Answer, value: list[str]) -> None:
    assert not any(text in way for way in _ways(answer)[:1] for text in value), _ways(answer)


def ways(_: Question, answer: Answer, value: list[str]) -> None:
    """Each of these is in a way out."""
    missing = [text for text in value if not any(text in way for way in _ways(answer))]
    assert not missing, f"{missing} in {_ways(answer)}"


def way_gib(_: Question, answer: Answer, value: list[float]) -> None:
    """What a rank needs in the first way out."""
    _within(_need_gib(answer.verdict["instead"][0]), value, "GiB of the first way")


def purchase(_: Question, answer: Answer, value: str) -> None:
    """none: nothing to be bought is named; last: behind at least one change of the job, if at all."""
    bought = [number for number, way in enumerate(answer.verdict["instead"]) if way["bought"]]
    assert not bought if value == "none" else 0 not in bought, _ways(answer)


KEYS: dict[str, Callable[[Question, Answer, Any], None]] = {
    "exit": exit_code,
    **{
        key.__name__: key
        for key in (
            *(fits, strategy, row_fits, need_gib, same_need, free_gib, exchange_s, hours, change, against),
            *(says, never, first_way, never_first, ways, way_gib, purchase),
        )
    },
}


def wrong(question: Question, answer: Answer) -> Iterator[str]:
    """What of an answer is not as it was reckoned."""
    if "exit" not in question.expect and answer.prediction is None:
        yield answer.screen
        return
    for key, value in question.expect.items():
        try:
            KEYS[key](question, answer, value)
        except (AssertionError, KeyError, TypeError) as error:
            yield f"{key}: {error}"


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[each.id for each in QUESTIONS])
def test_the_answer_is_the_one_that_was_reckoned_by_hand(number: int) -> None:
    question = QUESTIONS[number]
    found = list(wrong(question, _asked(number)))
    if question.id in NOT_YET:
        assert found, f"{question.id} is right: python -m tests.unit.planner.what_ifs --write"
    else:
        assert not found, f"{question.asks}\n" + "\n".join(found)


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[each.id for each in QUESTIONS])
def test_the_screen_is_the_one_that_was_read(number: int) -> None:
    question = QUESTIONS[number]
    file = GOLDEN / f"{question.id}.txt"
    kept = file.read_text(encoding="utf-8") if file.exists() else ""
    right = "" if question.id in NOT_YET else golden(question, _asked(number))
    assert right == kept, "read the difference, then: python -m tests.unit.planner.what_ifs --write"


def test_there_are_enough_questions_and_each_is_asked_once() -> None:
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS) >= 60
    assert sum(bool(question.was) for question in QUESTIONS) >= 20
    assert set(NOT_YET) <= {each.id for each in QUESTIONS}
    assert {file.stem for file in GOLDEN.glob("*.txt")} <= {each.id for each in QUESTIONS}


NOT_FITTING = [number for number, each in enumerate(QUESTIONS) if each.expect.get("fits") is False]


@pytest.mark.parametrize("number", NOT_FITTING, ids=[QUESTIONS[number].id for number in NOT_FITTING])
def test_the_first_ways_out_fit_where_somebody_writes_them_into_the_job(number: int, tmp_path: Path) -> None:
    question, answer = QUESTIONS[number], _asked(number)
    for way in [each for each in answer.verdict["instead"] if not each["bought"]][:2]:
        changes = [change for words in way["changes"] for change in words.split(" with ")]
        left_out = [change.removeprefix("without ") for change in changes if change.startswith("without ")]
        words = [change.replace(": ", "=", 1) for change in changes if not change.startswith("without ")]
        asked = [question.plan, *(shlex.quote(each) for each in words), *(f"--without {name}" for name in left_out)]
        tried = ask(question.on(USUAL), " ".join(asked), tmp_path / question.id)
        assert tried.exit_code == 0, f"{way['changes']}: {tried.screen}"

"""`gangline summary RUN`: one page with what ran, how it went and how to repeat it, for browsers and as Markdown."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gangline.planner.outcome import compare, observe
from gangline.report.run_figures import figures_of
from gangline.report.run_summary import RunRecords, read_records, summary_json, summary_page
from gangline.report.summary_page import MOST_POINTS, Page, PageCurve, PageTable, PageText, markdown, page_html
from gangline.runs.typed_command import TypedCommand
from tests.unit.planner.outcomes import plan
from tests.unit.report.stories import STORIES, Past

EVIL = "<script>alert(1)</script>\"'&|`**x**[a](javascript:b)"
TYPED = TypedCommand(
    words=("gangline", "train", "my job.yaml", "steps=100"),
    folder="/home/alice",
    job_file="my job.yaml",
    job_text="name: tiny\nbatch: 8\n",
    gangline="0.2.0",
)


class Elements(HTMLParser):
    """The elements and texts of a page; fails for one that is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def elements(page: Page) -> Elements:
    found = Elements()
    found.feed(page_html(page))
    found.close()
    assert found.open == []
    return found


def step(number: int, attempt: int = 1, *, loss: float = 2.0, ranks: int = 2, **more: Any) -> dict[str, Any]:
    rows = [
        {
            "host": f"pc{rank + 1}",
            "rank": rank,
            "micro_batches": 1,
            "data_s": 0.1,
            "compute_s": 0.5,
            "wait_s": 0.2 * (1 + rank),
            "memory_bytes": 1 << 30,
        }
        for rank in range(ranks)
    ]
    record = {"kind": "step", "attempt": attempt, "step": number, "steps": 400, "loss": loss, "tokens": 100}
    return {**record, "step_s": 1.0, "tokens_per_s": 100.0, "ranks": rows, **more}


def read(past: Past, own: tuple[str, ...] | None = None) -> RunRecords:
    return read_records(past.view, records=past.layout, remote=None, own=own, can_resume=own is None)


def texts(page: Page, section: str) -> str:
    return markdown(Page(title="", sections={section: page.sections[section]}))


@pytest.mark.parametrize("name", STORIES)
def test_both_forms_tell_the_cause_and_what_to_type_next(tmp_path: Path, name: str) -> None:
    past = Past(tmp_path)
    STORIES[name](past)
    run = read(past, ("train.py", "--lr", "1e-4") if name == "own-program" else None)
    page = summary_page(run)
    shown = " ".join(elements(page).texts)
    for attempt in run.history.attempts:
        if attempt.error is not None:
            assert str(attempt.error["what"]).splitlines()[0] in shown
    if run.history.run.phase == "failed" and name != "own-program":
        assert "gangline resume calm-otter-7" in shown
        assert "gangline resume calm-otter-7" in markdown(page)


def test_the_cause_of_a_run_that_failed_at_once_is_told_once(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["own-program"](past)
    page = markdown(summary_page(read(past)))
    assert page.count("rank 1 on pc2: ModuleNotFoundError") == 1
    assert "| fix | read the log" in page


def test_an_attempt_without_a_lost_host_is_told_with_what_was_done(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["lost-host"](past)
    said = texts(summary_page(read(past)), "Faults, and what was done")
    assert "attempt 2 went on by itself from step" in said
    assert "without pc3" in said


def test_a_run_without_faults_says_so(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1"])
    past.steps(1, 3)
    past.state("finished")
    assert "No fault is recorded." in texts(summary_page(read(past)), "Faults, and what was done")


def test_what_was_typed_is_there_to_be_pasted(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.state("finished")
    TYPED.save(past.layout.typed)
    said = texts(summary_page(read(past)), "To repeat it")
    assert "\ngangline train 'my job.yaml' steps=100\n" in said
    assert "\nname: tiny\nbatch: 8\n" in said


def test_texts_of_hosts_and_names_are_shown_and_do_nothing(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=[EVIL])
    past.event("unreachable", host=EVIL, why=f"\x1b]0;title\x07{EVIL}")
    past.state("failed", error={"kind": "RunFailed", "what": EVIL, "seen": EVIL, "fix": EVIL, "exit_code": 5})
    past.line(past.head.metrics, step(1, ranks=1) | {"ranks": [{**step(1)["ranks"][0], "host": EVIL}]})
    page = summary_page(read(past))
    found = elements(page)
    assert {tag for tag, _ in found.seen} & {"script", "a", "img", "iframe", "link", "object", "form"} == set()
    assert not [name for _, attrs in found.seen for name in attrs if name.startswith("on") or name in {"src", "href"}]
    assert EVIL in " ".join(found.texts)
    assert "\x1b" not in page_html(page)
    said = re.sub(r"(?ms)^(`{3,})$.*?^\1$", "", markdown(page))
    assert "<script" not in said
    assert "[a](" not in said
    assert "&lt;script>" in said


def test_a_block_of_code_ends_where_it_should() -> None:
    page = Page(title="t", sections={"s": [PageText(lines=["```", "# not a title", "````"], verbatim=True)]})
    assert "\n`````\n```\n# not a title\n````\n`````\n" in markdown(page)


def test_secrets_are_taken_out(tmp_path: Path) -> None:
    past = Past(tmp_path)
    token = "hf_" + "a" * 30
    past.state(
        "failed", error={"what": f"refused {token}", "seen": "of-the-shell-9", "fix": "", "kind": "", "exit_code": 5}
    )
    past.event("failed", what=f"refused {token}", why="of-the-shell-9")
    page = summary_page(read(past), secrets=["of-the-shell-9"])
    for text in (markdown(page), page_html(page)):
        assert token not in text
        assert "of-the-shell-9" not in text
        assert "refused" in text


def test_the_page_loads_nothing_and_is_dark_where_the_reader_is() -> None:
    text = page_html(Page(title="t"))
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_long_run_on_many_ranks_stays_small() -> None:
    points = [(float(at), 5.0 / at) for at in range(1, 100_001)]
    curves = [PageCurve(title="loss", points=points, marks=points[::1000]) for _ in range(4)]
    size = len(page_html(Page(title="t", sections={"Curves": curves})).encode())
    assert size < 2_000_000
    (line,) = re.findall(r'<polyline points="([^"]+)"', page_html(Page(title="t", sections={"s": curves[:1]})))
    assert len(line.split()) <= MOST_POINTS


def test_a_spike_between_drawn_points_stays_visible() -> None:
    points = [(float(at), 9.0 if at == 5_555 else 1.0) for at in range(10_000)]
    (band,) = re.findall(
        r'<polygon points="([^"]+)"', page_html(Page(title="", sections={"": [PageCurve(title="", points=points)]}))
    )
    assert min(float(pair.partition(",")[2]) for pair in band.split()) == 10.0


def test_times_are_those_of_all_attempts_and_a_repeated_step_counts_once_in_the_curve() -> None:
    figures = figures_of([step(1), step(2, loss=3.0), step(2, 2, loss=1.0), {"kind": "step", "step": "x"}, {}])
    assert figures.curves["loss"] == {1: 2.0, 2: 1.0}
    assert (figures.num_steps, figures.tokens, figures.steps_s) == (3, 300, 3.0)
    first, second = figures.ranks["pc1", 0], figures.ranks["pc2", 1]
    assert (first.compute_s, first.network_s, first.waits_s) == (1.5, pytest.approx(0.6), 0.0)
    assert (second.network_s, second.waits_s) == (pytest.approx(0.6), pytest.approx(0.6))


def test_losses_that_are_no_numbers_are_left_out() -> None:
    figures = figures_of([step(1, loss="nan"), step(2), {"kind": "evaluation", "step": 2, "loss": "inf"}])  # type: ignore[arg-type]
    assert (figures.curves["loss"], figures.evaluations) == ({2: 2.0}, {})


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.state("finished")
    steps = [step(number, samples=8, time="2026-11-21T07:01:48.794+00:00") for number in range(1, 20)]
    for each in steps:
        past.line(past.head.metrics, each)
    compared = compare(plan(), observe(steps, attempt=1, batch=8, num_ranks=2), run_id="calm-otter-7", attempt=1)
    assert compared is not None
    compared.save(past.layout.comparison)
    run = read(past)
    (table, _) = summary_page(run).sections["Speed against the plan"]
    assert isinstance(table, PageTable)
    assert list(table.rows[0]) == ["step", "720 ms", "1 s", "-28 %"]
    told = json.loads(json.dumps(summary_json(run)))
    assert told["comparison"]["step_s"] == {"planned": 0.72, "measured": 1.0}
    assert told["num_steps"] == 19


def test_a_damaged_record_is_named_and_the_rest_is_told(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.state("finished")
    past.steps(1, 3)
    past.layout.plan.write_text("{", encoding="utf-8")
    said = texts(summary_page(read(past)), "The run")
    assert "Missing:" in said
    assert "plan.json" in said
    assert "3 of 400" in said
    assert "2.5 at step 1" in said

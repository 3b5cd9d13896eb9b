"""gangline from Python: cheap to import, and the same answers as the command."""

import json
import sys

import pytest

import gangline
from gangline.api import Curve
from gangline.cli.main import main
from gangline.errors import SpecError, UsageError
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState

JOB = {
    "model": "meta-llama/Llama-2-7b-hf",
    "method": "qlora",
    "data": {"train": "rows.jsonl", "sequence_length": 512},
    "batch": 8,
    "steps": 100,
}
HOSTS = "pc1=rtx4090,pc2=rtx3090"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_plan_is_that_of_the_command(tmp_path, capsys):
    plan = gangline.plan(JOB, hosts=HOSTS, link="1gbit")
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    assert gangline.plan("job.yaml", hosts=HOSTS, link="1gbit") == plan
    assert main(["plan", "job.yaml", "--hosts", HOSTS, "--link", "1gbit", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {key: said[key] for key in plan.document} == json.loads(json.dumps(plan.document))
    assert (plan.fits, plan.strategy, plan.steps) == (True, "pipeline", 100)
    assert plan.step_s == said["verdict"]["best"]["step"]["total_s"]
    assert "strategy   pipeline" in str(plan)
    assert "<pre>" in plan._repr_html_()


def test_overrides_are_values_and_not_text():
    plan = gangline.plan(JOB, hosts=HOSTS, overrides={"steps": 7, "method.targets": ["q_proj"], "name": "1.0"})
    assert plan.steps == 7
    with pytest.raises(SpecError, match="stepz"):
        gangline.plan(JOB, hosts=HOSTS, overrides={"stepz": 7})


def test_what_does_not_fit_is_an_answer():
    plan = gangline.plan({**JOB, "model": "meta-llama/Llama-2-70b-hf", "method": "full"}, hosts=HOSTS)
    assert (plan.fits, plan.strategy, plan.step_s) == (False, None, None)


def test_mistakes_in_the_keys_are_told_at_once():
    with pytest.raises(SpecError) as caught:
        gangline.plan({**JOB, "batch": -1, "modle": "x"}, hosts=HOSTS)
    assert "batch" in str(caught.value)
    assert "modle" in str(caught.value)


def run_of(home, phase="finished", **state):
    layout = RunLayout(home, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="job", phase=phase, **state).save(layout)
    host = {"name": "here", "workdir": str(home), "python": sys.executable}
    write_json(layout.cluster, {"name": "here", "hosts": [host]})
    lines = [
        {"kind": "step", "attempt": attempt, "step": step, "loss": loss}
        for attempt, step, loss in ((1, 1, 3.0), (1, 2, 9.0), (2, 2, 2.0), (2, 3, "nan"))
    ]
    lines.insert(2, {"kind": "evaluation", "attempt": 1, "step": 2, "loss": 2.5, "perplexity": 12.0})
    layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    layout.events.write_text(json.dumps({"kind": "event", "event": "finished", "step": 3}) + "\n")
    return gangline.Run("calm")


def test_a_run_is_opened_by_the_beginning_of_its_id(home):
    run = run_of(home)
    assert (repr(run), run.phase, run.ended) == ("Run('calm-otter-7')", "finished", True)
    assert [each.id for each in gangline.list_runs()] == ["calm-otter-7"]
    with pytest.raises(UsageError, match="no such run"):
        gangline.Run("bold")


def test_figures_of_a_step_that_was_done_again_are_the_last_ones(home):
    run = run_of(home)
    assert [(each["step"], each["loss"]) for each in run.metrics()] == [(1, 3.0), (2, 2.0), (3, "nan")]
    assert [each["perplexity"] for each in run.evaluations()] == [12.0]
    assert [each["event"] for each in run.events()] == ["finished"]
    curve = run.curve()
    assert (curve.points, curve.marks) == ([(1, 3.0), (2, 2.0)], [(2, 2.5)])


def test_waiting_returns_the_run_or_raises_its_error(home, monkeypatch):
    run = run_of(home, phase="failed", error=UsageError("it broke", seen="here", fix="mend it").to_json())
    updates = []
    with pytest.raises(UsageError, match="it broke"):
        run.wait(on_update=updates.append)
    assert updates[-1].last


def test_waiting_may_end_before_the_run(home):
    run = run_of(home, phase="preparing")
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(timeout_s=0.0)


def test_a_curve_is_a_picture(tmp_path):
    curve = Curve(title="a < b", points=[(1, 3.0), (5, 1.0)], marks=[(5, 2.0)])
    assert curve.save(tmp_path / "loss.svg").read_text() == curve._repr_svg_()
    assert '36.0,36.0 604.0,204.0"' in curve.svg()
    assert "a &lt; b" in curve.svg()
    assert "no steps" in Curve(title="", points=[]).svg()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_such"):
        gangline.nothing_such  # noqa: B018

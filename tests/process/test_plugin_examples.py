"""The packages of examples/plugins: installed as a user would, and rows of gangline's tables from there on."""

import dataclasses
import json
import shutil
import sys

import pytest

from gangline.callbacks import Action, Callbacks
from gangline.catalog.gpu_specs import find_gpu, peak_flops, suggest_gpus
from gangline.checks.judge import judge, prefixes
from gangline.cli.main import main
from gangline.config.load import load_job
from gangline.errors import PluginError, SpecError, UsageError
from gangline.exporters import EXPORTERS, ExportedRun, Exporters
from gangline.formats import FORMATS, RowError, Segment
from gangline.planner.decision import decide
from gangline.planner.plan import make_plan
from gangline.planner.report import Length, report
from gangline.plugins import find_plugins, package_digest, package_files, package_version
from gangline.strategies.table import STRATEGIES
from tests.packages import EXAMPLES, install_examples, installed, make_package
from tests.unit.checks.machines import cluster, cpu_only, host, inventory
from tests.unit.planner.worlds import query, world

JOB = "model: ./llama\ndata: {train: rows.jsonl, format: turns}\nbatch: 8\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """All examples in one folder, installed by pip from their sources without a network."""
    return install_examples(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def plugged(packages):
    with installed(packages):
        yield packages


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "rows.jsonl").touch()
    return tmp_path


def load(folder, text, *overrides):
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return load_job(folder / "job.yaml", overrides)


def test_every_example_is_short_and_is_listed_as_usable(plugged, capsys):
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plugins"]
    assert {row["group"].removeprefix("gangline.") for row in rows} >= {
        "backends",
        "callbacks",
        "checks",
        "exporters",
        "formats",
        "gpus",
        "strategies",
    }
    assert [row["fault"] for row in rows] == ["" for _ in rows]
    for module in EXAMPLES.glob("*/*.py"):
        lines = [line for line in module.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 45, module


def test_without_plug_ins_the_list_says_which_groups_there_are(capsys, monkeypatch):
    monkeypatch.setattr("gangline.cli.plugins.find_plugins", tuple)
    assert main(["plugins"]) == 0
    assert "gangline.exporters" in capsys.readouterr().out


def test_broken_and_slow_plug_ins_are_named_with_their_cause(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gangline.cli.plugins.SLOW_S", 0.1)
    modules = {"broken.py": "import nowhere", "slow.py": "import time; time.sleep(0.3)\nfrom gangline_csv import CSV"}
    entry_points = {"gangline.exporters": {"broken": "broken:CSV", "slow": "slow:CSV"}}
    shutil.copy(EXAMPLES / "exporter" / "gangline_csv.py", tmp_path)
    with installed(make_package(tmp_path, "bad-days", modules=modules, entry_points=entry_points)):
        assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    assert "exporter  broken  bad-days 0.1  cannot be used: ModuleNotFoundError: No module named 'nowhere'" in said
    assert "exporter  slow    bad-days 0.1  slow: its import takes 0." in said


def test_a_format_gives_its_segments_and_its_prompt(plugged):
    turns = FORMATS["turns"]
    row = {"question": "How many dogs? ", "answer": " Six."}
    expected = (Segment("Q: How many dogs?\nA:", learned=False), Segment(" Six.", learned=True))
    assert turns.segments(row) == expected
    assert turns.prompt("Why?") == "Q: Why?\nA:"
    with pytest.raises(RowError, match="repeats"):
        turns.segments({"question": "so", "answer": "so"})


def test_a_callback_of_a_job_has_its_options_by_name_or_alone(plugged, folder):
    for words in ("enough: 1.5", "enough: {loss: 1.5}"):
        job = load(folder, JOB + f"callbacks: {{{words}}}\n")
        assert job.callbacks == {"enough": {"loss": 1.5, "steps": 10}}
        assert job.plugins["gangline-enough"] == "0.1"
    with pytest.raises(SpecError, match=r"callbacks\.enough\.los"):
        load(folder, JOB + "callbacks: {enough: {los: 1.5}}\n")
    run = ExportedRun(run_id="r", attempt=1, folder=folder, job={})
    callbacks = Callbacks({"enough": {"loss": 1.5, "steps": 2}}, run, on_failure=pytest.fail)
    for step, loss in enumerate((2.0, 1.4, 1.6)):
        callbacks.on_step(step, {"train/loss": loss})
        assert (callbacks.take(Action.finish) == "enough") == (step == 2)


def test_a_job_names_plug_ins_and_keeps_their_versions(plugged, folder):
    job = load(folder, JOB + "report: {tensorboard: false, csv: {every: 5}}\n")
    assert job.data.format == "turns"
    assert job.data.overlong == "truncate"
    assert job.report.exporters == {"csv": {"path": "metrics.csv", "every": 5}}
    assert job.plugins == {"gangline-turns": "0.1", "gangline-csv": "0.1"}
    assert load(folder, JOB, "report.csv=figures.csv").report.exporters["csv"]["path"] == "figures.csv"
    assert load(folder, JOB, "report.csv=true").report.exporters["csv"] == {"path": "metrics.csv", "every": 1}
    assert "csv" not in load(folder, JOB, "report.csv=false").report.exporters


def test_a_strategy_is_named_in_a_job_planned_and_nobody_else_takes_it(plugged, folder):
    job = load(folder, JOB, "strategy=averaging")
    assert job.strategy.kind == "averaging"
    assert job.plugins == {"gangline-turns": "0.1", "gangline-averaging": "0.1"}
    free = query("meta-llama/Llama-3.2-1B", method="full")
    asked = dataclasses.replace(free, strategy=job.strategy)
    choice = decide(asked, world("a100-80gb,a100-80gb"))
    assert choice.runnable is not None
    assert (choice.runnable.strategy.kind, choice.runnable.is_exact) == ("averaging", False)
    (weights,) = choice.runnable.traffic.exchanges
    assert weights.num_bytes == 4 * asked.architecture.num_parameters
    assert any("then weights are averaged" in line for line in report(choice, Length(None), width=400))
    plan = make_plan(job, cluster(host("pc1"), host("pc2")), candidate=choice.runnable)
    assert (plan.strategy, plan.moving_shares) == ("averaging", False)
    assert plan.gang("calm-otter-7", 1).strategy == "averaging"
    auto = decide(free, world("a100-80gb,a100-80gb"))
    assert "averaging" not in {candidate.strategy.kind for candidate in auto.by_kind}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ROW = object()", "expected an object of gangline.strategies.base.PlanHalf"),
        ("class Half(PlanHalf):\n    kind = 'good'\nROW = Half()", "expected kind = 'bad'"),
        ("class Half(PlanHalf):\n    kind = 'bad'\nROW = Half()", 'expected train = "module:Class"'),
        ("class Half(PlanHalf):\n    kind, train = 'bad', 'a:B'\nROW = Half()", "expected a meaning"),
    ],
)
def test_a_strategy_that_is_no_plan_half_says_what_it_lacks(tmp_path, text, cause):
    modules = {"bad_strategy.py": f"from gangline.strategies.base import PlanHalf\n{text}\n"}
    entry_points = {"gangline.strategies": {"bad": "bad_strategy:ROW"}}
    with installed(make_package(tmp_path, "bad", modules=modules, entry_points=entry_points)):
        with pytest.raises(PluginError, match=r"the strategy 'bad' of the package bad 0\.1") as caught:
            STRATEGIES["bad"]
        assert cause in caught.value.seen


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.format=turn", 'did you mean "turns"?'),
        ("strategy=averagin", 'did you mean "averaging"?'),
        ("data.fields={reply: a}", "expected roles out of question, answer"),
        ("report.cvs=true", 'did you mean "csv"?'),
        ("report.csv={every: often}", "expected a whole number"),
        ("report.csv={evry: 5}", 'did you mean "every"?'),
        ("report.csv={path: a/b}", 'the text "a/b"'),
    ],
)
def test_what_is_off_in_a_job_is_said_as_for_built_in_rows(plugged, folder, override, expected):
    with pytest.raises(SpecError) as caught:
        load(folder, JOB, override)
    assert expected in str(caught.value)


def test_a_job_whose_plug_in_is_not_installed_is_a_mistake_like_any_other(folder):
    with pytest.raises(SpecError, match="one of text, instruction, alpaca, completion, chat"):
        load(folder, JOB)


RUN = {"run_id": "calm-otter-7", "attempt": 2, "job": {}}


def test_an_exporter_writes_and_goes_on_where_it_was(plugged, tmp_path):
    failures = []
    for _ in range(2):
        run = ExportedRun(**RUN, folder=tmp_path)
        exporters = Exporters(
            {"csv": {"path": "a.csv", "every": 2}}, run, on_failure=lambda *each: failures.append(each)
        )
        for step in range(4):
            exporters.step(step, {"train/loss": 0.5})
        exporters.evaluation(3, {"evaluation/loss": 1.0})
        exporters.close()
    assert failures == []
    lines = ["2,0,train/loss,0.5", "2,2,train/loss,0.5", "2,3,evaluation/loss,1.0"]
    assert (tmp_path / "a.csv").read_text().splitlines() == lines * 2


@pytest.mark.parametrize("when", ["open", "step", "evaluation", "close"])
def test_an_exporter_that_fails_is_named_once_and_off(tmp_path, when):
    text = f"""
from gangline.exporters import Exporter
class Writer:
    def __init__(self, options, run): self.fail("open")
    def step(self, step, values): self.fail("step")
    def evaluation(self, step, values): self.fail("evaluation")
    def close(self): self.fail("close")
    def fail(self, at):
        if at == {when!r}: raise KeyError("oops")
ROW = Exporter(open=Writer)
"""
    entry_points = {"gangline.exporters": {"bad": "bad_exporter:ROW"}}
    failures = []
    with installed(make_package(tmp_path, "bad", modules={"bad_exporter.py": text}, entry_points=entry_points)):
        run = ExportedRun(**RUN, folder=tmp_path)
        exporters = Exporters({"bad": {}}, run, on_failure=lambda *each: failures.append(each))
        for step in range(3):
            exporters.step(step, {})
            exporters.evaluation(step, {})
        exporters.close()
    assert len(failures) == 1
    assert failures[0][0] == "bad"
    assert "the exporter 'bad' of the package bad 0.1" in failures[0][1]
    assert "KeyError: 'oops'" in failures[0][1]


CHANGED = """
import dataclasses
from gangline_uptime import RULES as OTHERS
RULES = (dataclasses.replace(OTHERS[0], {}),)
"""


def uptime(days):
    answer = cpu_only("pc1")
    answer["system"]["uptime_s"] = days * 86400.0
    return {"pc1": answer}


def test_a_check_finds_what_it_looks_for_and_is_chosen_by_its_name_and_id(plugged):
    facts = inventory(uptime(200))
    for only in ((), ("uptime",), ("E-UPTIME-01",), ("E-UP",)):
        found = judge(facts, cluster(host("pc1")), only=only)
        assert [(finding.id, finding.evidence) for finding in found] == [("E-UPTIME-01", "up for 200 days")]
    assert judge(inventory(uptime(3)), cluster(host("pc1"))) == ()
    assert judge(facts, cluster(host("pc1")), only=("memory",)) == ()
    with pytest.raises(UsageError, match="'uptim'") as caught:
        prefixes(["uptim"])
    assert caught.value.fix == "did you mean 'uptime'?"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RULES = ()", "expected a sequence of gangline.checks.rules.Rule"),
        ("RULES = 5", "object is not iterable"),
        ("import nowhere", "No module named 'nowhere'"),
        (CHANGED.format("id='E-NET-01'"), "'E-NET-01' is no id"),
        (CHANGED.format("id='E-BAD-01', look=lambda *_: 1 / 0"), "ZeroDivisionError"),
    ],
)
def test_a_check_that_is_broken_is_a_finding_and_the_others_go_on(packages, tmp_path, text, cause):
    entry_points = {"gangline.checks": {"bad": "bad_check:RULES"}}
    folder = make_package(tmp_path, "bad", modules={"bad_check.py": text}, entry_points=entry_points)
    with installed(packages), installed(folder):
        found = judge(inventory(uptime(200)), cluster(host("pc1")))
    assert [finding.id for finding in found] == ["E-PLUGIN-01", "E-UPTIME-01"]
    assert "the family of checks 'bad' of the package bad 0.1" in found[0].title
    assert cause in found[0].evidence


def test_a_gpu_is_found_by_its_name(plugged):
    found = find_gpu("NVIDIA Example Accelerator X1")
    assert found.memory_gb == 32
    assert found.tflops == pytest.approx(102.4)
    assert peak_flops("Example Accelerator X1") == pytest.approx(102.4e12)
    assert find_gpu("example accelerator x1") == found
    assert "Example Accelerator X1" in suggest_gpus("exampel accelerator")
    assert find_gpu("rtx4090").name == "GeForce RTX 4090"


def test_known_gpus_import_no_plug_in(plugged):
    sys.modules.pop("gangline_more_gpus", None)
    assert find_gpu("NVIDIA GeForce RTX 4090")
    assert "gangline_more_gpus" not in sys.modules


# --- what travels


def test_the_files_of_a_package_work_from_another_folder(plugged, tmp_path):
    files = package_files("gangline-csv")
    assert {name.rpartition("/")[2] for name in files} == {"gangline_csv.py", "METADATA", "entry_points.txt", "RECORD"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    digest = package_digest("gangline-csv")
    sys.path.remove(str(plugged))
    try:
        with installed(tmp_path):
            package_files.cache_clear()
            assert EXPORTERS.plugin("csv").package == "gangline-csv"
            assert package_version("gangline-csv") == "0.1"
            assert package_digest("gangline-csv") == digest
    finally:
        sys.path.insert(0, str(plugged))
        package_files.cache_clear()


def test_an_editable_installation_travels_by_the_modules_of_its_entry_points(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "mine" / "data").mkdir(parents=True)
    (source / "mine" / "__init__.py").write_text("raise SystemExit('imported')")
    (source / "mine" / "data" / "words.txt").write_text("words")
    entry_points = {"gangline.formats": {"mine": "mine.deep:ROW"}}
    make_package(site, "mine", modules={"__editable__.mine.pth": str(source)}, entry_points=entry_points)
    with installed(site), installed(source):
        names = set(package_files("mine"))
    assert {"mine/__init__.py", "mine/data/words.txt"} <= names
    assert not any(name.endswith(".pth") for name in names)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"mine.py": "", "fast.cpython-312-x86_64-linux-gnu.so": ""}, "is compiled"),
        ({"gangline/mine.py": ""}, "files of gangline itself"),
        ({}, "no file of it can be found"),
    ],
)
def test_a_package_that_cannot_travel_is_refused(tmp_path, modules, expected):
    entry_points = {"gangline.formats": {"mine": "nowhere_mine:ROW"}}
    with installed(make_package(tmp_path, "mine", modules=modules, entry_points=entry_points)):
        with pytest.raises(PluginError, match="mine cannot be brought to the hosts") as caught:
            package_files("mine")
        assert expected in caught.value.seen
    with pytest.raises(PluginError, match="is not installed on this computer"):
        package_files("nobody-has-this")
    assert all(plugin.package != "mine" for plugin in find_plugins())

"""gangline bench: what it asks for, and where its answer goes."""

import json

import pytest

from gangline.bench.scaling import HostSpeed, Scaling, Turn
from gangline.cli import bench
from gangline.cli.main import main

TURN = Turn(tokens_per_s=95.0, steps=2, step_s=1.0, exposed_s=0.01, shares=(2, 1))
HOSTS = tuple(
    HostSpeed(host=name, device="cpu", ranks=(rank,), alone_tokens_per_s=(speed,) * 3, alone_micro_batches=3)
    for rank, (name, speed) in enumerate((("pc1", 66.0), ("pc2", 34.0)))
)
SCALING = Scaling(
    job="tiny",
    method="lora",
    dtype="bf16",
    trained_numbers=1000,
    batch=3,
    micro_batch=1,
    sequence_length=8,
    moving=True,
    one_machine=False,
    hosts=HOSTS,
    together=(TURN,) * 3,
    even=(TURN,),
    measured="2026-01-01T00:00:00+00:00",
    versions={"gangline": "1"},
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """What `bench scaling` was asked to measure."""
    found = []

    def measure(start, *, seconds, console):
        found.append((start, seconds))
        return SCALING

    monkeypatch.setattr(bench, "bench_scaling", measure)
    return found


def test_figures_are_data_and_kept_nowhere(asked, capsys):
    assert main(["bench", "scaling", "job.yaml", "batch=40", "--cluster", "home.yaml"]) == 0
    out, err = capsys.readouterr()
    assert "together   95.0 tokens/s: 95.0% of the sum (worst of 3: 95.0%)" in out.splitlines()
    assert err == ""
    ((start, seconds),) = asked
    assert (start.job.name, start.cluster.name, start.overrides, seconds) == (
        "job.yaml",
        "home.yaml",
        ("batch=40",),
        180.0,
    )


def test_the_same_as_one_document(asked, capsys):
    assert main(["bench", "scaling", "job.yaml", "--json", "--seconds", "30"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema_version"], data["ratio"], data["warnings"]) == (1, pytest.approx(0.95), [])
    assert asked[0][1] == 30.0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("scaling",), "bench scaling needs a job"),
        (("compute",), "bench compute needs a job"),
        (("network", "home.yaml", "batch=40"), "bench network takes one file"),
    ],
)
def test_words_that_make_no_sense_are_usage_errors(words, what, capsys):
    assert main(["bench", *words]) == 2
    assert what in capsys.readouterr().err


def test_this_computer_alone_has_nobody_to_be_compared_with(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.txt").write_text("a row\n")
    (tmp_path / "job.yaml").write_text("model: {path: model, start: random}\ndata: {train: rows.txt}\nbatch: 2\n")
    assert main(["bench", "scaling", "job.yaml"]) == 2
    assert "bench scaling compares several hosts with each alone" in capsys.readouterr().err

"""The trainer benchmark: both sides do the same training, and figures that would mislead are refused."""

import json

import pytest

from benchmarks import trainer
from benchmarks.trainer_cases import CASES
from benchmarks.trainer_report import LossesDiffer, check_losses, markdown
from tests.train import cases_benchmark

pytestmark = pytest.mark.rotating

SIDES = cases_benchmark.both_sides
MIB = 1 << 20


def line(side, *, case="full", number=1, speed=1000.0, peak=300 * MIB, **changes):
    return {
        "case": case,
        "side": side,
        "round": number,
        "steps": 22,
        "tokens_per_s": speed,
        "flops_per_s": 5e14,
        "peak_bytes": peak,
        "start_bytes": 100 * MIB,
        "mean_loss": 8.5,
        "final_loss": 8.0,
        "threads": 2,
        "device": "cpu",
        "load": 0.1,
        "others": 0.02,
        "loaded": False,
        "versions": {"torch": "2.13.0"},
        **changes,
    }


@pytest.mark.parametrize("name", ["tiny-full", "tiny-lora-rows", "tiny-lora-bf16", "tiny-full-bf16"])
def test_both_sides_do_the_same_training(zygote, tmp_path, name):
    ours, theirs = zygote.fork(SIDES, name=name, folder=str(tmp_path)).result()
    check_losses([ours, theirs])
    assert ours["tokens"] == theirs["tokens"] > 0
    assert min(ours["tokens_per_s"], theirs["tokens_per_s"]) > 0
    assert ours["peak_bytes"] >= ours["start_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-lora-bf16", "tiny-full-bf16"])
def test_both_sides_do_the_same_training_on_a_gpu(zygote, tmp_path, name):
    lines = zygote.fork(SIDES, name=name, folder=str(tmp_path), device="cuda").result()
    check_losses(lines)
    assert min(side["peak_bytes"] for side in lines) > 0


def test_the_rows_of_a_packed_case_are_full_and_hold_several_documents(zygote, tmp_path):
    found = zygote.fork(cases_benchmark.rows, name="tiny-full", folder=str(tmp_path)).result()
    assert set(found["lengths"]) == {CASES["tiny-full"].sequence_length}
    assert min(found["documents"]) > 1


def test_sides_whose_losses_differ_are_not_compared():
    with pytest.raises(LossesDiffer, match="final_loss"):
        check_losses([line("ours"), line("hf", final_loss=8.002)])
    with pytest.raises(LossesDiffer, match="mean_loss"):
        check_losses([line("ours", mean_loss=float("nan")), line("hf")])


def test_ratios_are_taken_within_a_round():
    lines = [line("ours", number=1, speed=1100), line("hf", number=1, speed=1000)]
    lines += [line("ours", number=2, speed=600), line("hf", number=2, speed=500)]
    table = markdown(lines)
    assert "| full | hf | 750 | 1.150 | 1.100 | 300 | 200 | - | 8.0000 |" in table
    assert "loaded" not in table


def test_mfu_is_of_the_devices_own_peak():
    assert "| 50.6 % |" in markdown([line("ours", device="NVIDIA H200")])


def test_figures_of_a_loaded_machine_say_so():
    assert "loaded machine" in markdown([line("ours", loaded=True)])


def test_a_busy_machine_is_refused(tmp_path, capsys):
    assert trainer.main(["--max-load", "-1", "--out", str(tmp_path / "lines")]) == trainer.BUSY
    assert "not measuring" in capsys.readouterr().out
    assert not (tmp_path / "lines").exists()


def test_the_gpu_cases_are_skipped_visibly_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trainer.main(["--suite", "gpu", "--loaded-ok", "--out", str(tmp_path / "lines")]) == 0
    told = capsys.readouterr().out
    assert told.count("no CUDA device on this machine") == 4 * 5
    assert "nothing was measured" in told


def test_a_finished_benchmark_is_only_reported_again(tmp_path, capsys):
    out = tmp_path / "lines"
    out.write_text("".join(json.dumps(line(side)) + "\n" for side in ("ours", "hf")))
    arguments = ["--cases", "full", "--rounds", "1", "--threads", "2", "--loaded-ok", "--out", str(out)]
    assert trainer.main(arguments) == 0
    assert "| full | hf |" in capsys.readouterr().out

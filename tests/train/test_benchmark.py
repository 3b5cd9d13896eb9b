"""The trainer benchmark: both sides do the same training, and figures that would mislead are refused."""

import json

import pytest

from benchmarks import trainer
from benchmarks.speed_table import failed
from benchmarks.trainer_cases import CASES
from benchmarks.trainer_profile import report
from benchmarks.trainer_report import LossesDiffer, check_losses, markdown, speed_markdown
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


def test_a_finished_benchmark_is_only_reported_again(tmp_path, capsys):
    out = tmp_path / "lines"
    out.write_text("".join(json.dumps(line(side)) + "\n" for side in ("ours", "hf")))
    arguments = ["--cases", "full", "--rounds", "1", "--threads", "2", "--loaded-ok", "--out", str(out)]
    assert trainer.main(arguments) == 0
    assert "| full | hf |" in capsys.readouterr().out


def speed_line(side, **changes):
    more = {"step_s": [0.1, 0.1, 0.12], "cpu_s": 0.5, "duration_s": 1.0, "commit": "abc"}
    return {**line(side), "device": "NVIDIA H200", **more, **changes}


def test_the_speed_table_says_what_failed_and_what_is_no_comparison():
    lines = [speed_line("ours"), speed_line("hf", tokens_per_s=800.0), speed_line("trl", error="OutOfMemoryError: x")]
    table = speed_markdown(lines)
    assert "| full | hf | 800 | 1.250 | 50.6 % | 1.20 | 0.29 | 50 % | 8.5000 | 8.0000 |" in table
    assert "| full | trl | OutOfMemoryError: x |" in table
    assert "invalid" not in table
    differing = speed_markdown([speed_line("ours"), speed_line("hf", final_loss=8.1)])
    assert "invalid: case full: final_loss differs" in differing
    assert "1.250" not in differing


@pytest.mark.parametrize(
    "name", ["tiny-8b-qlora-2048", "tiny-8b-full-2048", "tiny-qwen3-8b-lora-2048", "tiny-moe-lora-2048"]
)
def test_both_sides_of_a_row_of_the_speed_table_do_the_same_training(zygote, tmp_path, name):
    ours, theirs = zygote.fork(SIDES, name=name, folder=str(tmp_path)).result()
    check_losses([ours, theirs])
    assert ours["flops_per_s"] > 0
    # weights are drawn, not read
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_another_side_has_no_memory_for_is_a_result():
    assert not failed(speed_line("hf", error="OutOfMemoryError: CUDA out of memory"))
    assert failed(speed_line("ours", error="OutOfMemoryError: CUDA out of memory"))
    assert failed(speed_line("hf", error="RuntimeError: x"))


def test_the_speed_table_goes_on_with_its_file(zygote, tmp_path):
    out = tmp_path / "lines"
    words = ["--table", "tiny", "--rows", "tiny-1b-lora-2048", "--sides", "hf", "ours", "trl-liger", "--out", str(out)]
    first = zygote.fork(cases_benchmark.table, words=[*words, "--seconds", "200"]).result()
    assert "skipped  tiny-1b-lora-2048 trl-liger" in first["text"]
    assert first["code"] == 0
    assert [json.loads(text)["side"] for text in out.read_text().splitlines()] == ["hf", "ours"]
    again = zygote.fork(cases_benchmark.table, words=[*words, "--rounds", "2", "--seconds", "0"]).result()
    assert again["text"].count("left     tiny-1b-lora-2048") == 2
    assert again["code"] == 1
    assert "| tiny-1b-lora-2048 | hf |" in again["text"]


def test_steps_on_a_card_are_timed_by_its_own_events(zygote):
    found = zygote.fork(cases_benchmark.clock_of_a_card).result()
    assert found["step_s"] == [0.25] * 4
    # idle at both ends, and the peak is of timed steps
    assert found["calls"] == ["synchronize", "reset_peak_memory_stats", "synchronize"]
    assert found["positive"]


@pytest.mark.parametrize(("opened", "way"), [(False, "fork"), (True, "spawn")])
def test_children_are_forked_unless_importing_has_opened_the_driver(zygote, tmp_path, opened, way):
    found = zygote.fork(cases_benchmark.way_to_start, folder=str(tmp_path), opened=opened).result()
    assert found == {"way": way, "told": [[9, 0]]}


def test_a_measurement_that_fails_is_a_line_of_its_own(zygote, tmp_path):
    found = zygote.fork(cases_benchmark.failing_measurement, folder=str(tmp_path)).result()
    assert found["raised"]["error"].startswith("KeyError")
    assert found["died"] == {"error": "its process ended with 3"}
    assert found["hung"] == {"error": "stopped after 1 s"}


@pytest.mark.parametrize("name", ["tiny-full", "tiny-1b-lora-2048", "tiny-moe-lora-2048"])
def test_the_flops_of_a_row_are_those_of_the_loop(zygote, tmp_path, name):
    found = zygote.fork(cases_benchmark.flops, name=name, folder=str(tmp_path)).result()
    assert found["row"] == pytest.approx(found["loop"], rel=0.01)


def test_a_profile_names_kernels_and_what_the_device_waited_for():
    device = [(0.0, 100.0, "gemm"), (100.0, 150.0, "norm"), (400.0, 500.0, "gemm")]
    processor = [(300.0, 450.0, "aten::linear"), (390.0, 401.0, "aten::to")]
    text = report(device, processor, title="a row")
    assert "a row: 0.5 ms, of which the device was idle 0.2 ms (50.0%) in 1 gaps; 3 kernels and copies" in text
    assert "     0.20  40.0%      2  gemm" in text
    assert "     0.25 ms      1 gaps, longest 0.25 ms  aten::linear > aten::to" in text


def test_our_side_can_be_profiled(zygote, tmp_path):
    found = zygote.fork(cases_benchmark.profiled, name="tiny-1b-lora-2048", folder=str(tmp_path)).result()
    assert "tiny-1b-lora-2048, 2 steps of ours" in found
    assert "aten::mm" in found

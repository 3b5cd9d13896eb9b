"""Figures are found in what trainers print, and nothing else is taken for one."""

import json

import pytest

from gangline.agent.supervise.script_figures import LineReader, ScriptFigures, figures_of

HF_BAR = "  8%|8         | 2/25 [00:01<00:30,  1.27s/it]"
COLOURS = (
    "\x1b[31mstep: 10  \x1b[32mloss:  4.1234  \x1b[38;2;1;2;3mgrad_norm:  1.0  \x1b[34mtps: 12,345  \x1b[36mtflops: 1.2"
)
MEGATRON = (
    " iteration       10/     100 | consumed samples:          160 | elapsed time per iteration (ms): 12.3 | "
    "learning rate: 1.000E-04 | global batch size:    16 | lm loss: 6.012345E+00 | loss scale: 1.0 |"
)

COUNTED = (
    "{'loss': '5.978', 'learning_rate': '5e-05', 'epoch': '0.002', 'num_input_tokens_seen': 384, "
    "'train_runtime': '0.6161', 'train_tokens_per_second': '623.3'}"
)
"""LLaMA-Factory with `--include_num_input_tokens_seen yes`."""


def read(*lines):
    reader = LineReader()
    news = [reader.read(line) for line in lines]
    return {name: value for name, value in reader.figures.items() if value is not None} if any(news) else None


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        ([HF_BAR], {"step": 2, "steps": 25}),
        ([HF_BAR, "{'loss': '2.3', 'grad_norm': '1.2', 'learning_rate': '4e-05', 'epoch': '0.1'}"], (2, 25, 2.3, 4e-5)),
        ([HF_BAR, "{'loss': 2.3, 'learning_rate': 4e-05, 'throughput': 120.5}"], (2, 25, 2.3, 4e-5, 120.5)),
        ([HF_BAR, COUNTED], (2, 25, 5.978, 5e-5, 623.3)),
        ([COLOURS], {"step": 10, "loss": 4.1234, "tokens_per_s": 12345.0}),
        (["iter 10: loss 3.2, time 123.45ms, mfu 1.2%"], {"step": 10, "loss": 3.2}),
        (["step 0: train loss 4.2, val loss 4.1"], {"step": 0, "loss": 4.2}),
        (["Epoch 2:  12%|#| 3/25 [00:00<00:01, 12.3it/s, v_num=0, train_loss=2.310]"], {"step": 53, "loss": 2.31}),
        (["epoch: 0 - iteration: 200 - loss 6.1234"], {"step": 200, "loss": 6.1234}),
        ([MEGATRON], (10, 100, 6.012345, 1e-4)),
        (["steps: 10 loss: 0.123 iter time (s): 0.1 samples/sec: 12.1"], {"step": 10, "loss": 0.123}),
        (["1|10|Loss: 1.23:  10%|#         | 10/100 [00:01<00:09, 9.9it/s]"], {"step": 10, "steps": 100}),
        (["Epoch 1 | iter 10 step 2 | loss train: 2.1, val: n/a | iter time: 300 ms"], {"step": 10, "loss": 2.1}),
        (["[RANK0] Epoch 1 | Iter 100 | Train Loss 2.31"], {"step": 100, "loss": 2.31}),
        (["step 3 loss 2.0 1,234 tok/s"], {"step": 3, "loss": 2.0, "tokens_per_s": 1234.0}),
        (["step 3 loss 2.0", "step 4 loss nan"], {"step": 4}),
        (["step 3 loss 2.0", "epoch 1 loss 1.9"], {"step": 3, "loss": 2.0}),
        (["[train] test/run.py:3 step 3 loss 2.0", "[eval] step 9 loss 1.9"], {"step": 3, "loss": 2.0}),
        (["step 10: val acc 0.3, train loss 2.0"], {"step": 10, "loss": 2.0}),
        (["Epoch 1/3:  12%|#| 3/25 [00:00<00:01, 12.3it/s, loss=2.3]"], {"step": 3, "loss": 2.3}),
        (
            ["Epoch 0/3: 100%|#| 25/25 [00:00<00:01, 1it/s]", "Epoch 1/3:  12%|#| 3/25 [00:00<00:01, 1it/s]"],
            {"step": 28},
        ),
    ],
)
def test_what_trainers_print(lines, figures):
    names = ("step", "steps", "loss", "learning_rate", "tokens_per_s")
    expected = figures if isinstance(figures, dict) else dict(zip(names, figures, strict=False))
    assert read(*lines) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Total optimization steps = 500",
        "Resuming training from step 20",
        "loss function: mse",
        "[RANK0] Epoch 1 | Iter 0 | Eval Loss 2.31",
        "step 20: val loss 3.1",
        "Validation step 3/10 loss=2.4",
        "test iter 20 | loss: 2.4",
        "sec/step: 0.3 loss: 2.0",
        "Epoch 1 validation:  20%|#| 1/5 [00:01<00:02, 1.2it/s, loss=2.3]",
        "{'loss': 2.3}",
        "{'train_runtime': 10.0, 'train_loss': 2.3, 'step': 5}",
        "Tokenizing train dataset:  50%|##### | 500/1000 [00:00<00:00, 9 examples/s]",
        "Building labels for train dataset: 100%|##########| 4000/4000 [00:00<00:00, 7850.62 examples/s]",
        "Dropping rows: 100%|##########| 4000/4000 [00:00<00:00, 7850.62it/s]",
        "Loading weights: 100%|#####| 8/8 [00:00<00:00, 9it/s]",
        "  0%|          | 0/25 [00:00<?, ?it/s]",
    ],
)
def test_what_is_no_step(line):
    assert read(line) is None


def test_the_bar_of_an_evaluation_is_not_that_of_the_training():
    evaluation = " 50%|#####     | 1/2 [00:00<00:00, 12.2it/s]"
    assert read(HF_BAR, evaluation, "{'eval_loss': 2.2, 'eval_runtime': 1}") == {"step": 2, "steps": 25}


def test_tokens_per_second_from_tokens_so_far():
    now = iter((10.0, 10.0, 12.0))
    reader = LineReader(clock=lambda: next(now))
    reader.read(HF_BAR)
    for tokens in (1000, 1250, 1500):
        reader.read(f"{{'loss': 2.3, 'num_tokens': {tokens}.0}}")
    assert reader.figures["tokens_per_s"] == 250.0


class Log:
    """A log that grows, and what was made of it."""

    def __init__(self, folder):
        self.now = 100.0
        self.path, self._metrics = folder / "rank-0.log", folder / "metrics.jsonl"
        self.figures = ScriptFigures(self.path, self._metrics, clock=lambda: self.now)

    def prints(self, text):
        with self.path.open("a") as log:
            log.write(text)
        self.figures.look()
        return self.lines()

    def lines(self):
        return [json.loads(line) for line in self._metrics.read_text().splitlines()] if self._metrics.exists() else []


def test_lines_are_noted_once_and_also_where_they_come_in_pieces(tmp_path):
    log = Log(tmp_path)
    assert log.prints("step 1 lo") == []
    (line,) = log.prints("ss 2.5\nstep 2")
    assert (line["kind"], line["step"], line["loss"], line["source"]) == ("step", 1, 2.5, "output")
    log.now += 4.0
    lines = log.prints(" loss 2.4\nstep 3 loss 2.3\n")
    assert [each["step"] for each in lines] == [1, 2, 3]
    assert [each["step_s"] for each in lines] == [None, None, 2.0]
    assert len(log.prints("done\n")) == 3


def test_what_came_just_before_the_end_is_read_too(tmp_path):
    log = Log(tmp_path)
    log.prints("step 1 loss 2.5\n")
    with log.path.open("a") as stream:
        stream.write("." * (1 << 19) + "\nstep 2 loss 2.4\nstep 3 loss 2.3")
    log.figures.look_last()
    assert [each["step"] for each in log.lines()] == [1, 2, 3]


def test_many_states_of_a_bar_are_one_line(tmp_path):
    log = Log(tmp_path)
    states = "".join(f"\r {number}%|#| {number}/100 [00:01<00:30,  1.27s/it]" for number in range(1, 8))
    log.prints(states)
    assert [each["step"] for each in log.prints("")] == [6, 7]  # the end of the last is not known at once


def test_where_no_step_is_printed_those_of_the_optimizer_count(tmp_path):
    log = Log(tmp_path)
    (tmp_path / "rank-0.count").write_text("4")
    (line,) = log.prints("Loss: 7.5\n")
    assert (line["step"], line["loss"], line["source"]) == (4, 7.5, "optimizer")
    assert len(log.prints("Loss: 7.4\n")) == 1
    log.now += 6.0
    (tmp_path / "rank-0.count").write_text("6")
    assert log.prints("")[-1]["step_s"] == 3.0
    assert log.prints("step 60 loss 7.3\n")[-1]["source"] == "output"


def test_a_script_that_uses_hooks_is_not_read(tmp_path):
    (tmp_path / "rank-0.step").write_text("1\n")
    assert Log(tmp_path).prints("step 1 loss 2.5\n") == []


def test_only_the_host_of_rank_0_reads_and_only_programs_of_the_user(tmp_path):
    files = {"rank_files": str(tmp_path / "runs/a/attempts/1")}
    assert figures_of({"program": "command", "ranks": [0, 1], **files}) is not None
    assert figures_of({"program": "command", "ranks": [2], **files}) is None
    assert figures_of({"program": "worker", "ranks": [0], **files}) is None

"""The plan against a GPU, with a tiny model on a processor, for a process of its own."""

import json
from pathlib import Path

from benchmarks import gpu_plan
from benchmarks.gpu_plan import Setting, Task

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SETTINGS = {
    "lora": Setting(model="mixture", method="lora", length=64, micro_batch=2, packed=True, timed=True),
    "qlora": Setting(model="mixture", method="qlora", length=64, accumulation=2, checkpointing=True),
    "full": Setting(model="mixture", method="full", length=64, pure=True),
}


def tiny() -> None:
    """The settings of this process are small ones."""
    gpu_plan.MIXTURE = TINY
    gpu_plan.SETTINGS = SETTINGS
    gpu_plan.CALIBRATION_S = 0.2


def line(name: str, kind: str, device: str) -> dict:
    """One line of the file."""
    tiny()
    return gpu_plan.line_of(Task(name=name, kind=kind, setting=SETTINGS[name], room=0), device)


def instants() -> list:
    """At which instants of a step a meter is told to be."""
    from gangline.worker.trace.steps import mark

    tiny()
    seen: list[str] = []

    class Meter:
        def instant(self, name: str) -> None:
            seen.append(name)

    losses = gpu_plan._train(mark(gpu_plan._session(SETTINGS["qlora"], "cpu"), Meter()))
    return [seen, losses]


def whole(folder: str, *words: str) -> list:
    """The program: its exit code, and the lines that it has written."""
    tiny()
    out = Path(folder) / "lines.jsonl"
    code = gpu_plan.main(["--out", str(out), "--device", "cpu", *words])
    return [code, [json.loads(text) for text in out.read_text().splitlines()]]


def dying(folder: str) -> list:
    """The same, where a process of a setting is killed by what it does."""
    import os
    import signal

    tiny()
    gpu_plan.measure_memory = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return whole(folder, "--only", "full")

"""How soon `gangline data` answers on a file of the size of GSM8K's training rows.

    [chrt -f 1] python -m benchmarks.data_answer [--times N]

The rows are drawn: 7,473 of them, whose questions and answers are about as long as GSM8K's (4.2 MB in all). The
tokenizer is a byte-level one, trained on the spot on these words and on random ones. Each answer is one line of JSON:
seconds on the clock, seconds of processors of both processes, what it says of the rows, and the load of the machine.
On a machine with other work, `chrt -f 1` (as root) takes the processors from it for these seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_ROWS = 7473
QUESTION_CHARS, ANSWER_CHARS = (235, 95), (285, 150)
"""Mean, and deviation."""
END = "<end>"
JOB = """\
name: answer
model: {path: ./model, start: random}
data: {train: rows.jsonl, format: completion, fields: {prompt: question, completion: answer}}
batch: 8
steps: 10
"""
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def write_inputs(folder: Path) -> None:
    """Rows, a tokenizer with a config, and a job."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(4000)]
    words += [str(number) for number in range(300)]

    def text(mean: int, deviation: int) -> str:
        size = max(30, round(draw.gauss(mean, deviation)))
        return " ".join(draw.choices(words, k=size // 4))[:size].capitalize()

    rows = [{"question": text(*QUESTION_CHARS), "answer": text(*ANSWER_CHARS)} for _ in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=50_000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    others = ("".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(100_000))
    tokenizer.train_from_iterator((*(row["answer"] for row in rows), *others), trainer)
    model = folder / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    shape = {**CONFIG, "num_attention_heads": 4, "vocab_size": tokenizer.get_vocab_size()}
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 2048}), encoding="utf-8")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (model / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


def measured(folder: Path) -> dict[str, object]:
    """One answer."""
    command = [str(Path(sys.executable).with_name("gangline")), "data", "job.yaml"]
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = next(line for line in done.stdout.splitlines() if line.startswith("rows "))
    load = round(os.getloadavg()[0], 1)
    return {"wall_s": round(wall_s, 2), "processor_s": round(used_s, 2), "said": rows, "load": load}


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    words = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gangline-") as name:
        write_inputs(Path(name))
        size = (Path(name) / "rows.jsonl").stat().st_size
        print(json.dumps({"rows": NUM_ROWS, "bytes": size}), flush=True)
        for _ in range(words.times):
            print(json.dumps(measured(Path(name))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tokenise many short rows: seconds, peak memory, tokens. One JSON line per case is appended to a file.

    python benchmarks/tokenise_rows.py --rows 1000000 --output figures.jsonl

Rows are made from a seed, so that every run reads the same ones. Each case runs in a process of its own, whose peak
resident memory is read at the end, beside that of the imports alone. Cases that the output file has already are left
out: stop and start it as you like.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = (
    "the rope joins every dog of a sled team and pulls together over ice and snow until night falls on the river "
    "while machines count steps share work measure time move tokens read rows write files keep promises"
)
WORDS = CORPUS.split()
FORMATS = ("text", "completion")


def write_rows(path: Path, *, kind: str, num_rows: int) -> None:
    """Rows of 5 to 60 words, the same for the same number."""
    numbers = random.Random(7)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(num_rows):
            words = " ".join(numbers.choices(WORDS, k=numbers.randint(5, 60)))
            row = {"text": f"{index} {words}"}
            if kind == "completion":
                row = {"prompt": f"{index} {words[:40]}", "completion": words[40:] or " none"}
            stream.write(json.dumps(row) + "\n")


def write_model(folder: Path) -> None:
    """A folder with a byte-level BPE of 4096 tokens and a config.json, no weights."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    numbers = random.Random(1)
    texts = (" ".join(numbers.choices(WORDS, k=30)) + f" {numbers.random()}" for _ in range(2000))
    bpe.train_from_iterator(texts, vocab_size=4096, special_tokens=["</s>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4096, "max_position_embeddings": 4096}))


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path, *, kind: str, num_rows: int) -> dict[str, float | int | str]:
    """Tokenise the rows that lie in `folder`; the figures of one case."""
    from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
    from gangline.worker.data.prepare import prepare_inputs
    from gangline.worker.model import load_tokenizer

    model = ModelJob(path=str(folder / "model"), start="random")
    load_tokenizer(model)
    imports_bytes = peak_bytes()
    source = SourceJob(files=(str(folder / "rows.jsonl"),))
    data = DataJob(train=source, format=kind, sequence_length=1024)
    began = time.monotonic()
    inputs = prepare_inputs(Job(name="b", model=model, data=data, batch=1, micro_batch=1), folder / "root")
    counts = inputs.counts["train"]
    return {
        "case": f"{kind} {num_rows}",
        "rows": num_rows,
        "seconds": round(time.monotonic() - began, 2),
        "peak_bytes": peak_bytes(),
        "imports_bytes": imports_bytes,
        "file_bytes": (folder / "rows.jsonl").stat().st_size,
        "tokens": counts["tokens"],
        "samples": counts["samples"],
        "filled": round(counts["tokens"] / (counts["samples"] * 1024), 4),
    }


def main() -> None:
    """Run the cases that are missing from the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--output", type=Path, default=Path("tokenise_rows.jsonl"))
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        folder, kind, num_rows = options.case
        print(json.dumps(measure(Path(folder), kind=kind, num_rows=int(num_rows))))
        return
    done = {json.loads(line)["case"] for line in options.output.open()} if options.output.exists() else set()
    for num_rows in options.rows:
        for kind in options.formats:
            if f"{kind} {num_rows}" not in done:
                run_case(options.output, kind=kind, num_rows=num_rows)


def run_case(output: Path, *, kind: str, num_rows: int) -> None:
    """One case in a process of its own; its line goes to the terminal and the file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_rows(folder / "rows.jsonl", kind=kind, num_rows=num_rows)
        command = [sys.executable, __file__, "--case", name, kind, str(num_rows)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    print(line)
    with output.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


if __name__ == "__main__":
    main()

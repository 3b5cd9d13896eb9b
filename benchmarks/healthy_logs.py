"""Logs of trainings that go well: does `gangline explain FILE` accuse anybody in them?

    python -m benchmarks.healthy_logs train --library hf --seeds 0 12 --out logs    # real trainings, a log for each
    python -m benchmarks.healthy_logs read logs --megabytes 300

`train` runs in this Python, which needs the library: hf (transformers' Trainer), accelerate, lightning, trl (SFT and
DPO), ddp (torchrun's DistributedDataParallel over gloo, two ranks). Models have some thousand weights, and compute on
the processor. A seed chooses the rate, the form of the log, evaluations, saves, processes that load rows,
recomputation, bf16, and whether it goes on from its own checkpoint. What is printed to stdout and stderr is the log.

`read` reads every log by itself, then one of the given size, in which logs stand in any order, again and again. An
accusation is a cause, a `perhaps`, an echo or an `error` without a known line. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ACCUSES = ("cause", "symptom", "echo")
WORDS = [
    "the",
    "cat",
    "error",
    "failed",
    "loss",
    "network",
    "timeout",
    "memory",
    "of",
    "a",
    "is",
    "not",
    "found",
    "sat",
]
"""Rows are made of these: words of failures stand in texts that are trained on, too."""
STEPS = 40


def _rows(dice: random.Random, count: int = 64) -> list[str]:
    return [" ".join(dice.choices(WORDS, k=12)) for _ in range(count)]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s>' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    return LlamaForCausalLM(config)


def _arguments(dice: random.Random, folder: Path) -> dict[str, Any]:
    """What a seed chooses for Trainers of transformers and TRL."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": dice.choice([1e-4, 1e-3, 5e-3]),
        "logging_steps": dice.choice([1, 5]),
        "disable_tqdm": dice.random() < 0.4,
        "log_level": dice.choice(["info", "warning", "debug"]),
        "eval_strategy": dice.choice(["no", "steps"]),
        "eval_steps": 20,
        "save_steps": 20,
        "save_strategy": dice.choice(["no", "steps"]),
        "dataloader_num_workers": dice.choice([0, 0, 1]),
        "gradient_checkpointing": dice.random() < 0.3,
        "bf16": dice.random() < 0.3,
        "report_to": "none",
        "use_cpu": True,
        "seed": dice.randrange(1000),
    }


def hf(dice: random.Random, folder: Path) -> None:
    """Transformers' Trainer; with saves it goes on from the last one."""
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer, arguments = _tokenizer(), _arguments(dice, folder)
    rows = Dataset.from_dict({"text": _rows(dice)}).map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=16), remove_columns=["text"]
    )
    for resumed in (False, True) if arguments["save_strategy"] == "steps" else (False,):
        arguments["max_steps"] = STEPS * (1 + resumed)
        trainer = Trainer(
            model=_model(),
            args=TrainingArguments(**arguments),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train(resume_from_checkpoint=resumed)


def trl(dice: random.Random, folder: Path) -> None:
    """TRL's trainer of instructions, or of preferences."""
    from datasets import Dataset

    arguments, texts = _arguments(dice, folder), _rows(dice)
    if dice.random() < 0.5:
        from trl import SFTConfig, SFTTrainer

        talk = [[{"role": "user", "content": each}, {"role": "assistant", "content": each}] for each in texts]
        rows = Dataset.from_dict({"messages": talk})
        settings = SFTConfig(max_length=32, packing=dice.random() < 0.3, **arguments)
        SFTTrainer(
            model=_model(), args=settings, train_dataset=rows, eval_dataset=rows, processing_class=_tokenizer()
        ).train()
        return
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_dict({"prompt": texts, "chosen": _rows(dice), "rejected": _rows(dice)})
    DPOTrainer(
        model=_model(),
        ref_model=_model(),
        args=DPOConfig(max_length=32, **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=_tokenizer(),
    ).train()


def accelerate(dice: random.Random, folder: Path) -> None:
    """A loop of one's own with accelerate, which saves its state and loads it."""
    import logging

    import torch
    from accelerate import Accelerator
    from accelerate.logging import get_logger

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    accelerator, log = Accelerator(cpu=True), get_logger("train")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=dice.choice([1e-3, 1e-2]))
    rows = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 8), batch_size=4, num_workers=dice.choice([0, 1]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows)
    for epoch in range(3):
        for step, batch in enumerate(loader):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.info("epoch %d step %d loss %.4f", epoch, step, loss.item())
        accelerator.save_state(str(folder / f"epoch_{epoch}"))
        accelerator.load_state(str(folder / f"epoch_{epoch}"))


def lightning(dice: random.Random, folder: Path) -> None:
    """Lightning's Trainer with a bar, a validation and a checkpoint."""
    import lightning as pl
    import torch

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def _loss(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.layer(batch) - batch).square().mean()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self._loss(batch)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val_loss", self._loss(batch), prog_bar=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    rows = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 8), batch_size=4, num_workers=dice.choice([0, 1]))
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        default_root_dir=str(folder),
        log_every_n_steps=dice.choice([1, 10, 100]),
        enable_progress_bar=dice.random() < 0.7,
        logger=False,
    )
    trainer.fit(Net(), rows, rows)


def ddp(dice: random.Random, folder: Path) -> None:
    """Two ranks of torchrun, of which each prints."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    script.write_text(DDP, encoding="utf-8")
    told = {"TORCH_DISTRIBUTED_DEBUG": dice.choice(["OFF", "INFO", "DETAIL"]), "TORCH_CPP_LOG_LEVEL": "INFO"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(words, env={**os.environ, **told}, check=True)


DDP = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    rows = torch.randn(4, 8)
    loss = (model(rows) - rows).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(f"[rank {dist.get_rank()}] step {step} loss {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""

LIBRARIES: dict[str, Callable[[random.Random, Path], None]] = {
    each.__name__: each for each in (hf, trl, accelerate, lightning, ddp)
}


def train(library: str, seeds: range, out: Path) -> None:
    """A log for each seed; all in one process, since to import the libraries takes longest."""
    out.mkdir(parents=True, exist_ok=True)
    said = os.dup(2)
    for seed in seeds:
        log = out / f"{library}-{seed}.log"
        if log.exists() or log.with_suffix(".failed").exists():
            continue
        with tempfile.TemporaryDirectory() as folder, (out / "unfinished.part").open("wb") as stream:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
            begun = time.monotonic()
            try:
                LIBRARIES[library](random.Random(f"{library} {seed}"), Path(folder))
            except Exception:  # noqa: BLE001 - it was no healthy one: its log is kept apart
                traceback.print_exc()
                log = log.with_suffix(".failed")
            sys.stdout.flush()
            sys.stderr.flush()
        (out / "unfinished.part").rename(log)
        os.write(said, f"{log.name} {log.stat().st_size:,} bytes, {time.monotonic() - begun:.0f} s\n".encode())


def accusations(path: Path) -> list[str]:
    """What `explain` says of a log, as far as it accuses."""
    from gangline.report.log_answer import answer_json, read_log

    answer = answer_json([read_log(path)])
    found = [f"{each['level']} {each['id']}: {each['text']}" for each in answer["found"] if each["level"] in ACCUSES]
    return found + [f"error: {each['text']}" for each in answer["unknown_errors"]]


def read(folder: Path, megabytes: int) -> int:
    """Every log, then all of them as one of that size; 1 if one accuses."""
    logs = sorted(folder.glob("*.log"))
    rows: dict[str, list[str]] = {log.name: accusations(log) for log in logs}
    dice, begun = random.Random(0), time.process_time()
    texts = [log.read_bytes() for log in logs]
    with tempfile.NamedTemporaryFile(suffix=".log") as whole:
        size = 0
        while size < megabytes * 1_000_000 and texts:
            size += whole.write(f"run {dice.randrange(10**9)}\n".encode() + dice.choice(texts))
        whole.flush()
        rows[f"{size / 1e6:.0f} MB of them"] = accusations(Path(whole.name))
    counts = Counter(name.partition("-")[0] for name in rows if name.endswith(".log"))
    print(json.dumps({"logs": counts, "bytes": sum(map(len, texts)), "cpu_s": round(time.process_time() - begun, 1)}))
    for name, told in rows.items():
        for line in told:
            print(f"{name}: {line[:200]}")
    accused = sum(bool(told) for told in rows.values())
    print(f"{accused} of {len(rows)} accuse")
    return 1 if accused or not logs else 0


def main() -> int:
    """Train or read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    trains = verbs.add_parser("train")
    trains.add_argument("--library", choices=sorted(LIBRARIES), required=True)
    trains.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    trains.add_argument("--out", type=Path, required=True)
    reads = verbs.add_parser("read")
    reads.add_argument("folder", type=Path)
    reads.add_argument("--megabytes", type=int, default=300)
    arguments = parser.parse_args()
    if arguments.verb == "read":
        return read(arguments.folder, arguments.megabytes)
    train(arguments.library, range(*arguments.seeds), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

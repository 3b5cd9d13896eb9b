"""Converted jobs train as HF Trainer would have trained them: the first 20 losses of each, compared.

    python -m benchmarks.convert_losses FOLDER... [--jobs 20] [--steps 20] [--templates FOLDER]

Every file is read twice. `gangline convert` makes a job of it, which the worker's own loop trains. The other side
reads the file's own keys into TrainingArguments, and HF Trainer trains the same weights on the same samples in the
same order.
Model and rows are small and made here (a Llama of 100 k weights in fp32, 3,000 rows); on both sides quantised weights
are whole, moments have 32 bits, dropout is off, samples have 256 tokens, and one process does the work of all. What is
compared is what the file says of batch, accumulation, rate, schedule, warm-up, decay, betas, clipping, adapters and
packing. Nothing of the folders is copied or kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.convert_examples import jobs
from gangline.config.foreign import kind_of
from gangline.config.load import load_job, read_values
from gangline.convert.move import MoveQuestion, move_job
from gangline.convert.outcomes import as_number, is_off
from gangline.errors import GanglineError, ModelError
from gangline.runs.job import Job
from gangline.worker.batch import SampleOrder
from gangline.worker.data.tokens import TokenSet

LENGTH, ROWS = 256, 3000
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Side:
    """What both sides read."""

    job: Job
    rows: TokenSet
    folder: Path


class _Nobody:
    def ask(self, question: str) -> None:
        """There is no terminal."""


def main() -> None:
    """Compare as many jobs as asked; exit code 1 where one is apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--templates", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    worst, done, seen = 0.0, 0, set()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        make_rows(Path(folder))
        for path in jobs(asked.folders):
            if done == asked.jobs:
                break
            values = read_values(path, kind="foreign")
            words = theirs(values, asked.steps)
            if words is None or (key := json.dumps(words, sort_keys=True, default=str)) in seen:
                continue
            side = converted(path, Path(folder), model, asked.steps, asked.templates)
            if side is None or len(side.rows) < side.job.batch * asked.steps:  # all steps lie in one epoch
                continue
            try:
                apart = compare(side, words)
            except ModelError:  # adapters or tokens that this family does not have
                continue
            seen.add(key)
            done += 1
            worst = max(worst, apart)
            print(f"{done:3}  {apart:.1e}  {path}", flush=True)
    print(f"{done} jobs, {asked.steps} losses each: at most {worst:.1e} apart (tolerance {TOLERANCE:.0e})")
    sys.exit(int(worst > TOLERANCE or done < asked.jobs))


def converted(path: Path, folder: Path, model: Path, steps: int, templates: Path | None) -> Side | None:
    """Our side: the converted job over the small model and rows; None where the file is not converted."""
    from gangline.worker.data.prepare import prepare_inputs

    given = [f"model={model}", f"data.train={folder / 'rows.jsonl'}", "data.eval=none", f"steps={steps}"]
    given += ["precision=fp32", "method.dropout=0.0", f"data.sequence_length={LENGTH}", "data.overlong=truncate"]
    given += ["optimizer.kind=adamw", "activation_checkpointing=false", "activation_offloading=false"]
    output = folder / "job.yaml"
    asked = MoveQuestion(files=(path,), world_size=1, output=output, templates=templates)
    try:
        moved = move_job(asked, console=_Nobody())
        if moved.made.refused:
            return None
        for file, text in {**moved.files, output: moved.text}.items():
            file.write_text(text, encoding="utf-8")
        job = load_job(output, _fitting(moved.made.job, given))
    except GanglineError:
        return None
    job = replace(job, method=replace(job.method, kind="lora" if job.method.kind == "qlora" else job.method.kind))
    job = replace(job, data=replace(job.data, fields={}, roles={}, max_samples=None), micro_batch=1)
    inputs = prepare_inputs(job, folder / "root")
    return Side(job=job, rows=TokenSet.open(folder / "root" / "data" / inputs.train), folder=folder)


def _fitting(job: dict[str, Any], given: list[str]) -> list[str]:
    """Without keys that the kind of training does not have; early stopping and evaluations are not compared."""
    full = job.get("method.kind", "full") == "full"
    given = [word for word in given if not (full and word.startswith("method."))]
    given += [f"{key}=none" for key in ("evaluation.every_steps", "evaluation.every_epochs") if key in job]
    given += ["data.chat_template=none"] if "data.chat_template" in job else []
    given += ["early_stopping=none"] if "early_stopping.patience" in job else []
    return given + (["data.overlong=split"] if job.get("data.format") == "text" else [])


def theirs(values: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """The file's own keys as TrainingArguments; None for one that this script does not read."""
    kind = kind_of(values)
    if kind is None or kind.tool not in {"Axolotl", "LLaMA-Factory", "TRL"}:
        return None
    names = {
        "learning_rate": "learning_rate",
        "weight_decay": "weight_decay",
        "adam_beta1": "adam_beta1",
        "adam_beta2": "adam_beta2",
        "adam_epsilon": "adam_epsilon",
        "max_grad_norm": "max_grad_norm",
        "lr_scheduler_type": "lr_scheduler_type",
        "lr_scheduler": "lr_scheduler_type",
    }
    found = {ours: values[name] for name, ours in names.items() if values.get(name) is not None}
    found = {name: as_number(value) if as_number(value) is not None else value for name, value in found.items()}
    if kind.tool == "Axolotl":
        found.setdefault("lr_scheduler_type", "cosine")
        micro = values.get("micro_batch_size") or 1
        batch = micro * (values.get("gradient_accumulation_steps") or (values.get("batch_size") or micro) // micro)
        warmup = _axolotl_warmup(values)
    else:
        batch = (values.get("per_device_train_batch_size") or 8) * (values.get("gradient_accumulation_steps") or 1)
        warmup = values.get("warmup_steps") or values.get("warmup_ratio") or 0
    unlike = "cosine_min_lr_ratio", "lr_scheduler_kwargs", "use_galore", "use_muon", "lr_quadratic_warmup"
    if any(not is_off(values.get(name)) for name in unlike) or values.get("optim") == "adafactor":
        return None
    return {**found, "warmup_steps": warmup, "max_steps": steps, "gradient_accumulation_steps": int(batch)}


def _axolotl_warmup(values: dict[str, Any]) -> float | int:
    """As its builder counts it, but rounded up as transformers does: the difference is stated by `convert`."""
    if values.get("warmup_steps") is not None:
        return values["warmup_steps"]
    return values["warmup_ratio"] if values.get("warmup_ratio") is not None else 0.03


def compare(side: Side, words: dict[str, Any]) -> float:
    """The greatest difference of a loss over the steps."""
    ours, start = our_losses(side)
    return float(max(abs(a - b) for a, b in zip(ours, their_losses(side, start, words), strict=True)))


def our_losses(side: Side) -> tuple[list[float], torch.nn.Module]:
    """The losses of the worker's own loop on one rank, and the model as it was before."""
    from gangline.runs.gang import Gang, GangRank
    from gangline.runs.layout import RunLayout
    from gangline.worker.loop import Loop
    from gangline.worker.process_group import ProcessGroup
    from gangline.worker.progress import TrainingProgress
    from gangline.worker.rank_files import PhaseFile, StopFlag
    from gangline.worker.record import Recorder
    from gangline.worker.run_io import RunIO
    from gangline.worker.session import build_session

    losses: list[float] = []

    class Kept(Recorder):
        def step(self, report: Any, *, step: int, **figures: Any) -> None:
            super().step(report, step=step, **figures)
            losses.append(figures["loss"])

    gang = Gang(run_id=f"convert-{os.getpid()}", attempt=1, ranks=(GangRank(host="here", share=side.job.batch),))
    world = ProcessGroup(gang=gang, rank=0, device=torch.device("cpu"))
    layout = RunLayout(side.folder / "runs", gang.run_id)
    layout.folder.mkdir(parents=True, exist_ok=True)
    recorder = Kept(side.job, layout, world)
    session = build_session(side.job, world, train_set=side.rows, evaluation_set=None)
    start = copy.deepcopy(session.model)
    phase = PhaseFile(layout.folder / "rank-0.phase")
    Loop(session, RunIO(recorder=recorder, saver=None, stop=StopFlag(), phase=phase), TrainingProgress()).run()
    recorder.close()
    return losses, start


def their_losses(side: Side, model: torch.nn.Module, words: dict[str, Any]) -> list[float]:
    """The losses of HF Trainer: samples one by one in our order, each step's batch by accumulation."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    losses: list[float] = []
    batch = side.job.batch
    if batch != words["gradient_accumulation_steps"]:
        return [float("inf")] * side.job.steps  # type: ignore[operator]  # the batch itself is apart
    order = SampleOrder(num_samples=len(side.rows), batch=batch, micro_batch=1, seed=side.job.seed)
    indices = np.concatenate([order.samples(step) for step in range(side.job.steps or 0)])

    class InTheirOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **options)
            losses.append(float(loss))
            return loss

    arguments = TrainingArguments(
        output_dir=str(side.folder / "theirs"), per_device_train_batch_size=1, optim="adamw_torch", use_cpu=True,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
        remove_unused_columns=False, dataloader_pin_memory=False, **words,
    )  # fmt: skip
    rows = [_row(side.rows, int(index), packed=side.job.data.packing) for index in indices]
    trainer = InTheirOrder(model=model, args=arguments, train_dataset=rows, data_collator=_one)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [sum(losses[at : at + batch]) for at in range(0, len(losses), batch)]


def _row(source: TokenSet, index: int, *, packed: bool) -> dict[str, list[int]]:
    sample = source.sample(index)
    row = {"input_ids": sample.input_ids.tolist(), "labels": [-100, *sample.targets[:-1].tolist()]}
    return row | {"position_ids": sample.position_ids.tolist()} if packed else row


def _one(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def make_model(folder: Path) -> Path:
    """A Llama with random weights, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = folder / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "</s>": 1, **{letter: number for number, letter in enumerate(alphabet, start=2)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast.save_pretrained(path)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(vocabulary), max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_rows(folder: Path) -> None:
    """Sums, as rows that every format of the files can read."""
    draw = random.Random(5)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for _ in range(ROWS):
            a, b = draw.randrange(100), draw.randrange(100)
            question, answer = f"{a} + {b}?", str(a + b)
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row = {"instruction": question, "output": answer, "messages": talk, "text": f"{question} {answer}"}
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

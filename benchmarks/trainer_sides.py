"""The sides of the trainer benchmark: the same training in gangline's Loop, in HF Trainer and in TRL."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.trainer_cases import ALPHA, CLIP_NORM, RANK, SEED, Case
from benchmarks.trainer_inputs import InOrder, drawing, model_folder, open_rows, stack

Trained = tuple[nn.Module, float]
"""The model afterwards, and its mean loss over all steps."""
PROFILED_STEPS = 2


class Clock:
    """Times the steps after the warm-up; the device is idle at both ends."""

    def __init__(self, case: Case, *, profiler: Any = None) -> None:
        """profiler: of torch, which is on while the first PROFILED_STEPS after the warm-up run."""
        self._case = case
        self._profiler = profiler
        self._step = 0
        self._started = self._ended = (0.0, 0.0)
        self.marks: list[torch.cuda.Event] = []
        """On a GPU: when it had done what each of the timed steps, and the last untimed one, gave it to do."""

    @property
    def duration_s(self) -> float:
        """Seconds of the timed steps."""
        return self._ended[0] - self._started[0]

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the timed steps, over all threads: hardly changed by other programs."""
        return self._ended[1] - self._started[1]

    def tick(self) -> None:
        """A step is done, with all that the trainer writes about it."""
        self._step += 1
        on_card = self._case.device == "cuda"
        if on_card and self._step >= self._case.warmup_steps:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        if self._step in (self._case.warmup_steps, self._case.steps):
            if on_card:
                torch.cuda.synchronize()
            if on_card and self._step == self._case.warmup_steps:
                torch.cuda.reset_peak_memory_stats()  # not of loading and quantising
            self._started, self._ended = self._ended, (time.perf_counter(), time.process_time())
        if self._profiler is not None:
            self._profile(self._step - self._case.warmup_steps)

    def _profile(self, done: int) -> None:
        if done == 0:
            self._profiler.start()
        if done == PROFILED_STEPS:
            if self._case.device == "cuda":
                torch.cuda.synchronize()
            self._profiler.stop()

    def step_s(self) -> list[float]:
        """Seconds of every timed step on the device; on a CPU nothing."""
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(self.marks)]


def load_side(side: str) -> Callable[[Case, Path, Clock], Trained]:
    """Import all that a side needs, so that its memory can be told from the training's."""
    import peft  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    if side.startswith("ours"):
        import torch.utils.tensorboard  # noqa: F401

        from gangline.worker import loop  # noqa: F401

        kernels = "torch" if side.endswith("torch") else "auto"
        return _with(train_ours, kernels=(kernels,), compile=side.endswith("compiled"))
    from transformers import DataCollatorForSeq2Seq, Trainer  # noqa: F401

    if side.startswith("trl"):
        import trl  # noqa: F401
        from trl import SFTTrainer  # noqa: F401

        return _with(train_trl, liger=side.endswith("liger"))
    return _with(train_hf, liger=side.endswith("liger"))


def _with(train: Callable[..., Trained], **options: Any) -> Callable[[Case, Path, Clock], Trained]:
    return lambda case, folder, clock: train(case, folder, clock, **options)


def train_ours(case: Case, folder: Path, clock: Clock, **choices: Any) -> Trained:
    """The worker's own loop as one rank runs it, with metrics.jsonl, TensorBoard and the phase file.

    choices: of the job, beside what the case says.
    """
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

    class Timed(Recorder):
        def step(self, report: Any, *, step: int, **figures: Any) -> None:
            super().step(report, step=step, **figures)
            losses.append(figures["loss"])
            clock.tick()

    job = replace(_job(case, folder), **choices)
    gang = Gang(run_id=f"bench-{os.getpid()}", attempt=1, ranks=(GangRank(host="here", share=case.accumulation),))
    world = ProcessGroup(gang=gang, rank=0, device=torch.device(case.device))
    layout = RunLayout(folder, gang.run_id)
    recorder = Timed(job, layout, world)
    with drawing(case, _weights_dtype(case)) if case.drawn else nullcontext():
        session = build_session(job, world, train_set=open_rows(folder, case), evaluation_set=None)
    phase = PhaseFile(layout.folder / "rank-0.phase")
    Loop(session, RunIO(recorder=recorder, saver=None, stop=StopFlag(), phase=phase), TrainingProgress()).run()
    recorder.close()
    return session.model, sum(losses) / len(losses)


def _job(case: Case, folder: Path) -> Any:
    from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, OptimizerJob, ScheduleJob, SourceJob

    return Job(
        name=case.name,
        model=ModelJob(path=str(model_folder(folder, case)), start="random" if case.drawn else "pretrained"),
        method=MethodJob(kind=case.method, rank=RANK, alpha=ALPHA),
        data=DataJob(train=SourceJob(), packing=case.packed, sequence_length=case.sequence_length),
        batch=case.batch,
        micro_batch=case.micro_batch,
        epochs=None,
        steps=case.steps,
        seed=SEED,
        precision=case.precision,
        parameters="compute" if case.pure else "auto",
        activation_checkpointing=case.recompute,
        kernels=("auto",),
        optimizer=OptimizerJob(learning_rate=case.learning_rate, clip_norm=CLIP_NORM),
        schedule=ScheduleJob(kind="constant"),
    )


def train_hf(case: Case, folder: Path, clock: Clock, *, liger: bool) -> Trained:
    """HF Trainer with everything off that costs time."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(case, folder, liger=liger))
    trainer = _in_order(Trainer)(
        model=_model(case, folder),
        args=arguments,
        train_dataset=InOrder(open_rows(folder, case), case),
        data_collator=_collator(case, folder),
        callbacks=[_ticks(clock)],
    )
    return trainer.model, trainer.train().training_loss


def train_trl(case: Case, folder: Path, clock: Clock, *, liger: bool) -> Trained:
    """TRL's SFTTrainer on the same tokens; its own preparation of data is skipped."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = InOrder(open_rows(folder, case), case)

    arguments = SFTConfig(
        **_arguments(case, folder, liger=liger), max_length=None, dataset_kwargs={"skip_prepare_dataset": True}
    )
    trainer = _in_order(SFTTrainer)(
        model=_model(case, folder),
        args=arguments,
        train_dataset=Dataset.from_list([rows[index] for index in range(len(rows))]),
        data_collator=_collator(case, folder),
        processing_class=AutoTokenizer.from_pretrained(model_folder(folder, case)),
        callbacks=[_ticks(clock)],
    )
    return trainer.model, trainer.train().training_loss


def _arguments(case: Case, folder: Path, *, liger: bool) -> dict[str, Any]:
    """Fair and fast: no reports, no saves, no bar, no search for NaN, the fused optimizer, no worker processes."""
    return {
        "output_dir": str(folder / f"hf-{os.getpid()}"),
        "max_steps": case.steps,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "learning_rate": case.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP_NORM,
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "bf16": case.precision == "bf16" and not case.pure,
        "gradient_checkpointing": case.recompute,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if case.recompute else None,
        "use_cache": False,
        "use_liger_kernel": liger,
        "average_tokens_across_devices": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": case.device == "cuda",
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": case.device == "cpu",
        "seed": SEED,
    }


def _in_order(kind: type) -> type:
    """A trainer that takes the rows as they come; transformers' own option for it is younger than 5.3."""

    class Sequential(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Sequential


def _ticks(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    return Ticks()


def _weights_dtype(case: Case) -> torch.dtype:
    """Of weights as they are loaded."""
    frozen_or_pure = case.method != "full" or case.pure
    return torch.bfloat16 if case.precision == "bf16" and frozen_or_pure else torch.float32


def _model(case: Case, folder: Path) -> nn.Module:
    """The model as our side loads it: the same dtypes, the same first adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    path, dtype = model_folder(folder, case), _weights_dtype(case)
    if case.drawn:
        with drawing(case, dtype):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.config.use_cache = False
    if case.method == "qlora":
        _to_four_bits(model, device=case.device)
    model.to(case.device)
    if case.method == "full":
        return model
    torch.manual_seed(SEED)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def _to_four_bits(model: Any, *, device: str) -> None:
    """Put bitsandbytes' linears in place of those inside the layers, as transformers loads them: NF4, scales, too."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = model.get_output_embeddings()
    linears = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if type(child) is nn.Linear and child is not head
    ]
    how = {"compress_statistics": True, "quant_type": "nf4"}
    for parent, key, linear in linears:
        made = Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta", **how
        )
        made.weight = Params4bit(linear.weight.data, requires_grad=False, module=made, **how)
        linear.weight = None
        setattr(parent, key, made.to(device))
    model.is_loaded_in_4bit = True


def _collator(case: Case, folder: Path) -> Callable[[list[Any]], Any]:
    if case.packed:
        return stack
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(model_folder(folder, case)))

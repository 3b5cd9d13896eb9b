"""Small models and sets of tokens in memory, and sessions built from them, for cases that run in ranks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from gangline.optimizers import EIGHT_BITS, OPTIMIZERS
from gangline.runs.gang import Gang, GangRank, rows_of
from gangline.runs.job import (
    CheckpointJob,
    DataJob,
    EvaluationJob,
    Job,
    MethodJob,
    ModelJob,
    OptimizerJob,
    ScheduleJob,
    SourceJob,
)
from gangline.worker.loop import Loop
from gangline.worker.precision import agree_precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.session import Session, build_session, make_strategy
from gangline.worker.strategy import StrategySetup

VOCABULARY = 96
IN_PARTS = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class MemorySet:
    """Rows of a counting language: learnable, of unequal lengths and numbers of trained tokens; the last token is unused.

    packed: every sample is two of them, which must not see each other.
    """

    def __init__(self, num_samples: int, *, seed: int = 0, longest: int = 20, packed: bool = False) -> None:
        draw = np.random.default_rng(seed)
        self._samples = [self._row(draw, longest) for _ in range(num_samples)]
        if packed:
            self._samples = [self._join(sample, self._row(draw, longest)) for sample in self._samples]
        self.label_counts = np.array([(row.targets != -100).sum() for row in self._samples])
        self.lengths = np.array([len(row.input_ids) for row in self._samples])

    @staticmethod
    def _row(draw, longest):
        length = int(draw.integers(4, longest))
        tokens = (np.arange(length) * int(draw.integers(1, 4)) + int(draw.integers(VOCABULARY))) % (VOCABULARY - 1)
        targets = np.append(tokens[1:], -100)
        targets[: int(draw.integers(0, length // 2))] = -100
        return SimpleNamespace(input_ids=tokens, targets=targets, position_ids=np.arange(length))

    @staticmethod
    def _join(*rows):
        arrays = ("input_ids", "targets", "position_ids")
        return SimpleNamespace(**{name: np.concatenate([getattr(row, name) for row in rows]) for name in arrays})

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, index: int):
        return self._samples[index]


def model_folder(*, layers: int = 2, **more) -> str:
    """A Llama of 28 k weights (with two layers) as a folder without weights; made once per process."""
    key = str((layers, more))
    if key not in _FOLDERS:
        from transformers import LlamaConfig

        _FOLDERS[key] = tempfile.TemporaryDirectory()
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        words = {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **more}
        LlamaConfig(num_hidden_layers=layers, **words).save_pretrained(_FOLDERS[key].name)
    return _FOLDERS[key].name


def wide_folder() -> str:
    """The same of 120 k weights: matrices of 4,096 numbers and more, whose moments can have 8 bits, and of fewer."""
    return model_folder(hidden_size=64, intermediate_size=136)


def mixture_folder() -> str:
    """The same of a mixture of experts: 4 of them, fused into two tensors, of which each token takes 2."""
    if not _MIXTURES:
        from transformers import Qwen3MoeConfig

        _MIXTURES.append(tempfile.TemporaryDirectory())
        Qwen3MoeConfig(
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        ).save_pretrained(_MIXTURES[0].name)
    return _MIXTURES[0].name


_FOLDERS: dict[str, tempfile.TemporaryDirectory] = {}
_MIXTURES: list[tempfile.TemporaryDirectory] = []


def make_job(
    *, method: str = "full", precision: str = "fp64", dropout: float = 0.1, optimizer: str = "adamw", **changes
) -> Job:
    """A job over a MemorySet: batch 10 of single rows, 40 steps, learning rate 3e-4.

    method: qlora-8 is qlora with 8 bits. optimizer: with one of 8 bits the model is the wide one, and adapters are as
    wide.
    """
    eight_bits = optimizer in EIGHT_BITS
    kind, _, bits = method.partition("-")
    job = Job(
        name="small",
        model=ModelJob(path=wide_folder() if eight_bits else model_folder(), start="random"),
        method=MethodJob(kind=kind, bits=int(bits or 4), rank=64 if eight_bits else 4, dropout=dropout),
        data=DataJob(train=SourceJob()),
        batch=10,
        micro_batch=1,
        epochs=None,
        steps=40,
        seed=7,
        precision=precision,
        draws="sample",
        kernels=("auto",),
        optimizer=OptimizerJob(kind=optimizer, **OPTIMIZERS[optimizer].keys, learning_rate=3e-4, weight_decay=0.01),
        schedule=ScheduleJob(kind="cosine", warmup_steps=5),
        evaluation=EvaluationJob(every_steps=None),
        checkpoint=CheckpointJob(every_minutes=None),
    )
    return replace(job, **changes)


def make_world(
    shares,
    *,
    rank: int,
    hosts=None,
    resume_step: int | None = None,
    attempt: int = 1,
    strategy: str = "ddp",
    lacking=(),
    device: str = "cpu",
    rows=(10,),
    settings=(),
) -> ProcessGroup:
    """The place of `rank` in a gang with these shares; every rank on a host of its own unless `hosts` says more.

    hsdp: two hosts, each with half of the ranks. tp: two ranks on each host, and `shares` are those of hosts.
    pipeline: `shares` are the layers of each rank, and `rows` what each pipeline does of 10 micro-batches. settings: of
    every rank, its micro_batch_size, activation_checkpointing and, if they are three, activation_offloading.
    """
    stages = ()
    if strategy == "tp":
        hosts = hosts or [f"pc{index // 2}" for index in range(2 * len(shares))]
        shares = [share for share in shares for _ in range(len(hosts) // len(shares))]
    size = len(shares)
    if strategy == "pipeline":
        stages = tuple(shares)
        shares = [share for row, share in zip(rows_of(stages, replicas=len(rows)), rows, strict=True) for _ in row]
    hosts = hosts or [f"pc{2 * index // size if strategy == 'hsdp' else index}" for index in range(size)]
    names = ("micro_batch_size", "activation_checkpointing", "activation_offloading")
    own = [dict(zip(names, each, strict=False)) for each in settings]
    ranks = tuple(
        GangRank(host=host, share=share, **(own[number] if own else {}))
        for number, (host, share) in enumerate(zip(hosts, shares, strict=True))
    )
    gang = Gang(
        run_id="calm-otter-7",
        attempt=attempt,
        ranks=ranks,
        resume_step=resume_step,
        strategy=strategy,
        stages=stages,
        replicas=len(rows),
        lacking=tuple(lacking),
    )
    return ProcessGroup(gang=gang, rank=rank, device=torch.device(device))


def make_session(
    job: Job,
    world: ProcessGroup,
    *,
    num_samples: int = 64,
    num_evaluation: int = 23,
    packed: bool = False,
    beat=lambda: None,
) -> Session:
    """A built session over MemorySets. A job in fp64 computes its norms in fp64, too.

    Under zero-3 the tensors are in parts: DeepSpeed keeps those of fewer than 100,000 numbers whole, as ours are.
    """
    if world.gang.strategy == "zero-3" and not job.strategy.deepspeed:
        job = replace(job, strategy=replace(job.strategy, deepspeed=IN_PARTS))
    if job.precision == "fp64":
        norms_in_own_dtype()
    world.gang.require_settings(job)
    job = world.gang.settings_of(world.rank, job)
    evaluation_set = MemorySet(num_evaluation, seed=1) if num_evaluation else None
    train_set = MemorySet(num_samples, packed=packed)
    return build_session(job, world, train_set=train_set, evaluation_set=evaluation_set, beat=beat)


def made(loss, job: Job, world: ProcessGroup, *, precision=None):
    """The strategy of a gang around a loss that is there already."""
    precision = precision or agree_precision(job, world.device, world_size=1)
    strategy = make_strategy(StrategySetup(job=job, world=world, precision=precision))
    strategy.wrap(loss)
    return strategy


def norms_in_own_dtype() -> None:
    """transformers computes RMSNorm in fp32 whatever the model's dtype; exactness in fp64 needs it in fp64."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, hidden):
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden * scale

    LlamaRMSNorm.forward = forward


@dataclass
class Captured:
    """A recorder that keeps what it is told."""

    steps: list
    evaluations: list
    events: list
    samples: list

    def step(self, report, *, step, **figures) -> None:
        self.steps.append((step, figures["loss"], figures["grad_norm"]))

    def evaluation(self, evaluation, *, step) -> None:
        self.evaluations.append((step, evaluation.loss))

    def event(self, event, **details) -> None:
        self.events.append({"event": event, **details})


def run_loop(session: Session, *, saver=None, progress: TrainingProgress | None = None, stop_after: int | None = None):
    """Train to the end, or ask for a stop at the end of step `stop_after`; returns (result, Captured)."""
    stop = StopFlag()
    progress = progress or TrainingProgress()
    captured = Captured([], [], [], [])
    if stop_after is not None:
        plain = captured.step
        stop.raised = progress.step + 1 >= stop_after

        def step_and_stop(report, *, step, **figures):
            plain(report, step=step, **figures)
            stop.raised = step + 1 >= stop_after

        captured.step = step_and_stop
    loop = Loop(session, RunIO(recorder=captured, saver=saver, stop=stop), progress)
    return loop.run(), captured


def scratch(path: str) -> Path:
    """A folder that the test made."""
    return Path(path)

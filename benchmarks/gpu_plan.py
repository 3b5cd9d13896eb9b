"""The plan's memory and time against one GPU, setting by setting: tensors by instant, the allocator, seconds of a step.

    python -m benchmarks.gpu_plan --out plan.jsonl --seconds 120            # memory of all settings, then times
    python -m benchmarks.gpu_plan --out plan.jsonl --only 1b-lora 8b-qlora  # these
    python -m benchmarks.gpu_plan --out plan.jsonl --device trace           # without a GPU: fake tensors in its place
    python -m benchmarks.gpu_plan --out plan.jsonl --show                   # tables of what the file has

Weights are random, made on the card from a config.json, and never written. Every setting trains in a process of its
own, forked from one that has imported everything and has no CUDA context; peaks are those of that process's own
allocator, so several settings share the card while memory is measured. Times are measured one setting after the other:
`bench compute`'s measurement of a copy of two layers first, then steps of the whole model.

A line for each: what `gangline plan --hosts` says, and what the card says. A file that has lines already is continued.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal
from unittest.mock import patch

from gangline.bench.compute import points_of, timed_batches
from gangline.cli.output import Terminal
from gangline.config.load import load_job
from gangline.context import REAL, Context
from gangline.decide.forecast import JobForecast, forecast_job
from gangline.planner.calibration import fit_compute, shallow_config, with_optimizer
from gangline.planner.candidate import Candidate
from gangline.planner.config import read_architecture
from gangline.planner.machines import PlannedCluster, assumed_link, bus_of, imagine
from gangline.planner.memory import Memory
from gangline.planner.software import STACKS
from gangline.planner.speed import RankWork, step_query, step_s
from gangline.planner.traffic import trained_weights
from gangline.runs.job import Job

GIB = 1 << 30
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "fixtures" / "planning" / "configs"
HOSTS = "here=h200"
STEPS, TIMED_STEPS, CALIBRATION_S = 2, 5, 3.0
DOCUMENTS = 4
"""In each packed sample."""
LIMIT_S = 60.0
"""A setting that takes longer is ended."""
AT_ONCE = 4
ROOM_GIB = 132.0
"""What settings that run at the same time may take together, by plan."""
CONTEXT_BYTES = 1 << 30
"""Of a process beside its tensors, at the most."""
Device = Literal["cuda", "cpu", "trace"]
Kind = Literal["memory", "time"]
Line = dict[str, Any]
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""A small mixture of experts, of 1.1 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to train."""

    model: str
    """A file of `CONFIGS`, or "mixture"."""
    method: Literal["full", "lora", "qlora"]
    length: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    packed: bool = False
    pure: bool = False
    checkpointing: bool = False
    offloading: bool = False
    optimizer: str = "adamw"
    timed: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        if self.model == "mixture":
            return MIXTURE
        found: dict[str, Any] = json.loads((CONFIGS / f"{self.model}.json").read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if not key.startswith("_")}

    def job(self, folder: Path, config: Mapping[str, Any], *, kernels: str = "auto") -> Job:
        """As a job.yaml has it; a folder gets the config.json."""
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = {
            "name": "plan",
            "model": str(folder),
            "method": {"kind": self.method},
            "data": {"train": "rows.txt", "sequence_length": self.length, "packing": self.packed},
            "batch": self.micro_batch * self.accumulation,
            "micro_batch": self.micro_batch,
            "steps": STEPS,
            "activation_checkpointing": self.checkpointing,
            "activation_offloading": self.offloading,
            "optimizer": self.optimizer,
            "kernels": kernels,
            "precision": {"compute": "bf16", "parameters": "compute" if self.pure else "fp32"},
        }
        return load_job(words, needs_data=False)


_lora, _qlora, _full = (partial(Setting, method=kind) for kind in ("lora", "qlora", "full"))
_ONE, _EIGHT, _QWEN, _MOE = "llama-3.2-1b", "llama-3-8b", "qwen3-8b", "mixture"
SETTINGS: dict[str, Setting] = {
    "1b-lora-packed": _lora(model=_ONE, micro_batch=4, accumulation=2, packed=True, timed=True),
    "8b-lora": _lora(model=_EIGHT, timed=True),
    "8b-qlora-recomputed": _qlora(model=_EIGHT, micro_batch=2, checkpointing=True, timed=True),
    "1b-full": _full(model=_ONE, micro_batch=2),
    "1b-full-pure": _full(model=_ONE, micro_batch=4, pure=True, timed=True),
    "moe-lora": _lora(model=_MOE, micro_batch=2),
    "8b-lora-8192-packed": _lora(model=_EIGHT, length=8192, checkpointing=True, packed=True, timed=True),
    "8b-lora-offloaded": _lora(model=_EIGHT, length=8192, checkpointing=True, offloading=True),
    "qwen-lora": _lora(model=_QWEN, timed=True),
    "8b-full-pure": _full(model=_EIGHT, pure=True, checkpointing=True),
    "1b-full-adam8": _full(model=_ONE, micro_batch=2, pure=True, optimizer="adamw-8bit"),
    "moe-full-pure": _full(model=_MOE, micro_batch=4, pure=True, timed=True),
    "1b-lora": _lora(model=_ONE, micro_batch=4),
    "1b-full-recomputed": _full(model=_ONE, micro_batch=4, checkpointing=True),
    "1b-lora-recomputed": _lora(model=_ONE, micro_batch=8, checkpointing=True),
    "1b-lora-8192-packed": _lora(model=_ONE, length=8192, packed=True),
    "1b-qlora": _qlora(model=_ONE, micro_batch=4),
    "1b-lora-512": _lora(model=_ONE, length=512, micro_batch=8, timed=True),
    "1b-full-adafactor": _full(model=_ONE, micro_batch=2, optimizer="adafactor"),
    "1b-full-muon": _full(model=_ONE, micro_batch=2, optimizer="muon"),
    "1b-full-accumulated": _full(model=_ONE, accumulation=4, packed=True, pure=True),
    "8b-qlora": _qlora(model=_EIGHT, length=1024),
    "8b-lora-512": _lora(model=_EIGHT, length=512, micro_batch=4),
    "8b-full-adam8": _full(model=_EIGHT, pure=True, checkpointing=True, optimizer="adamw-8bit"),
    "8b-qlora-paged": _qlora(model=_EIGHT, length=4096, packed=True, checkpointing=True, optimizer="paged-adamw-8bit"),
    "qwen-lora-recomputed": _lora(model=_QWEN, micro_batch=4, checkpointing=True),
    "qwen-qlora-packed": _qlora(model=_QWEN, packed=True),
    "qwen-full-pure": _full(model=_QWEN, length=1024, pure=True),
    "moe-full": _full(model=_MOE, micro_batch=2, checkpointing=True),
    "moe-lora-packed": _lora(model=_MOE, length=4096, packed=True, checkpointing=True),
}
"""By name, in the order of worth."""


# The plan's side.


def forecast(
    setting: Setting, folder: Path, *, hosts: str = HOSTS, kernels: str = "auto", stack: str = "gangline"
) -> JobForecast:
    """What `gangline plan --hosts` rests on; folder: where config.json may lie."""
    placements = imagine(hosts)
    world = PlannedCluster(placements=placements, wire=assumed_link(), inside=bus_of(placements), asked=False)
    context = Context(transports={}, home=folder, console=Terminal(quiet=True), deps=REAL)
    job = setting.job(folder, setting.config, kernels=kernels)
    return forecast_job(job, world, context, stack=STACKS[stack])


def candidate_of(setting: Setting, *, hosts: str = HOSTS, kernels: str = "auto", stack: str = "gangline") -> Candidate:
    """The way that the plan weighs for this setting."""
    with tempfile.TemporaryDirectory(prefix="gangline-") as folder:
        choice = forecast(setting, Path(folder), hosts=hosts, kernels=kernels, stack=stack).choice
    found = None if choice is None else choice.best
    assert found is not None, setting
    return found


def planned(memory: Memory) -> dict[str, Any]:
    """Bytes that the plan foresees, and those of tensors at every instant."""
    return {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes(),
        "process": memory.process_bytes(),
        "held": memory.persistent_bytes,
        "instants": {each.name: memory.persistent_bytes + each.num_bytes for each in memory.instants},
    }


def room_bytes(setting: Setting, candidate: Candidate) -> int:
    """The most that a process takes, the making of its model included."""
    whole = candidate.architecture.num_parameters * (2 if setting.pure or setting.method != "full" else 4)
    built = whole * (1.2 if setting.method == "qlora" else 1.0)
    return int(max(1.06 * candidate.needs[0].memory.reserved_bytes(), built)) + CONTEXT_BYTES


# The card's side: in a process of its own.


class CudaMeter:
    """The allocator's peak of every instant, under the names that a trace has for them."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._name = "before"
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self.requested = 0

    def instant(self, name: str) -> None:
        """From now on peaks count for the instant `name`."""
        cuda = self._cuda
        self.peaks[self._name] = max(self.peaks.get(self._name, 0), cuda.max_memory_allocated())
        self.reserved = max(self.reserved, cuda.max_memory_reserved())
        self.requested = max(self.requested, cuda.memory_stats().get("requested_bytes.all.peak", 0))
        cuda.reset_peak_memory_stats()
        self._name = name

    def figures(self) -> dict[str, Any]:
        """What was seen."""
        self.instant("after")
        peaks = {name: each for name, each in self.peaks.items() if name != "before"}
        stats = self._cuda.memory_stats()
        return {
            "allocated": max(peaks.values()),
            "reserved": self.reserved,
            "requested": self.requested,
            "instants": peaks,
            "retries": stats.get("num_alloc_retries", 0),
        }


def measure_memory(setting: Setting, device: str) -> dict[str, Any]:
    """Bytes of two steps; "held" is what lies there before them."""
    import torch

    from gangline.worker.trace.steps import mark

    session = _session(setting, device)
    taken = dict(session.kernels.taken)
    gc.collect()
    if device != "cuda":
        return {"taken": taken, "losses": _train(session)}
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    meter = CudaMeter()
    losses = _train(mark(session, meter))
    return {"taken": taken, "held": held, **meter.figures(), "losses": losses}


def _train(session: Any) -> list[float]:
    """Loss per trained token of each step."""
    steps = _stepper(session)
    trained = session.train_set.label_counts[0] * session.job.batch
    return [steps.advance().loss_sum / trained for _ in range(STEPS)]


def measure_time(setting: Setting, device: str) -> dict[str, Any]:
    """Seconds of steps, the median of those after the first, and memory beside the allocator's."""
    import torch

    steps, seconds = _stepper(_session(setting, device)), []
    for _ in range(TIMED_STEPS):
        begun = time.perf_counter()
        steps.advance()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    beside = {}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        beside = {"outside": total - free - torch.cuda.memory_reserved()}
    return {"step_s": median(seconds[2:]), "steps_s": seconds, **beside}


def calibrate(setting: Setting, device: str, *, seconds: float = CALIBRATION_S) -> list[dict[str, Any]]:
    """The records of `bench compute`, of one rank."""
    import torch
    import torch.distributed as dist

    from gangline.worker import calibrate as ranks

    candidate = candidate_of(setting)
    with tempfile.TemporaryDirectory(prefix="gangline-") as folder, redirect_stdout(StringIO()) as text:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        order = {
            "job": setting.job(Path(folder), setting.config).to_json(),
            "config": shallow_config(setting.config),
            "layers": 2,
            "points": points_of(candidate.training),
            "by_module": False,
            "seconds": seconds,
        }
        ranks.run(order, ranks.build(order, torch.device(device)))
        dist.destroy_process_group()
    return [json.loads(line) for line in text.getvalue().splitlines()]


def calibrated_s(setting: Setting, records: list[dict[str, Any]]) -> float:
    """Seconds of a step by the plan, with these records in place of a data sheet."""
    way = candidate_of(setting)
    copy = read_architecture(shallow_config(setting.config))
    model = fit_compute(timed_batches(records), copy, way.architecture, way.training, source="calibrated")
    update = next(record for record in records if record["kind"] == "optimizer")
    trained = trained_weights(way.architecture, way.training)
    model = with_optimizer(model, seconds=update["seconds"], numbers=update["numbers"], trained=trained)
    tokens, length = way.scenario.tokens
    ranks = [RankWork(compute=model, micro_batches=share) for share in way.shares]
    return step_s(step_query(way.strategy, way.traffic, ranks, way.world.fabric, tokens=tokens, length=length))


def _stepper(session: Any) -> Any:
    """The worker's own step."""
    from gangline.worker.loop import Synchronous, TrainingRun
    from gangline.worker.progress import TrainingProgress
    from gangline.worker.rank_files import StopFlag
    from gangline.worker.run_io import RunIO

    outlets = RunIO(recorder=None, saver=None, stop=StopFlag())
    return Synchronous(TrainingRun(session, outlets, TrainingProgress()))


def _session(setting: Setting, device: str, *, kernels: str = "auto") -> Any:
    """The worker's session, with a model drawn on the device."""
    import torch

    from gangline.runs.gang import Gang, GangRank
    from gangline.worker import session as sessions
    from gangline.worker.model import random_model
    from gangline.worker.process_group import ProcessGroup
    from gangline.worker.trace.steps import full_samples

    with tempfile.TemporaryDirectory(prefix="gangline-") as folder:
        job = setting.job(Path(folder), setting.config, kernels=kernels)
    job = replace(job, model=replace(job.model, start="random"), steps=STEPS + TIMED_STEPS)
    gang = Gang(run_id="plan", attempt=1, ranks=(GangRank(host="here", share=setting.accumulation),))
    world = ProcessGroup(gang=gang, rank=0, device=torch.device(device))
    rows = full_samples(
        job.batch * (STEPS + TIMED_STEPS),
        length=setting.length,
        vocabulary=int(setting.config["vocab_size"]),
        num_documents=DOCUMENTS if setting.packed else 1,
    )

    def drawn(asked: Job, *, device: torch.device, compute: torch.dtype) -> torch.nn.Module:
        # in the format of the weights: an 8B model in fp32 takes 32 GiB for a moment
        wide = torch.float32 if asked.method.kind == "full" and not setting.pure else compute
        return random_model(asked, setting.config, device=device, compute=compute, drawn=wide)

    with patch.object(sessions, "load_model", drawn):
        return sessions.build_session(job, world, train_set=rows, evaluation_set=None)


def measure_trace(setting: Setting) -> dict[str, Any]:
    """Bytes by `worker.trace`, on fake tensors."""
    from gangline.worker.trace.line import trace
    from gangline.worker.trace.order import TraceOrder

    with tempfile.TemporaryDirectory(prefix="gangline-") as folder:
        job = setting.job(Path(folder), setting.config)
    found = trace(
        TraceOrder(
            config=setting.config,
            method=job.method,
            precision="bf16",
            parameters="compute" if setting.pure else "fp32",
            micro_batch=setting.micro_batch,
            micro_batches=setting.accumulation,
            sequence_length=setting.length,
            packing=setting.packed,
            activation_checkpointing=setting.checkpointing,
            optimizer=job.optimizer,
        )
    )
    held = found["weights_bytes"] + found["optimizer_bytes"]
    return {"held": held, "allocated": found["peak_bytes"], "instants": found["instants"], "notes": found["notes"]}


# Many settings: each forked from this process, which has imported everything and has touched no GPU.

Work = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One line to be made. room: bytes of the card that it takes."""

    name: str
    kind: Kind
    setting: Setting
    room: int


def tasks(names: Iterable[str], device: Device, *, done: Iterable[tuple[str, str]] = ()) -> Iterator[Task]:
    """What is not done, memory first."""
    have, chosen = set(done), {name: SETTINGS[name] for name in names}
    kinds: tuple[Kind, ...] = ("memory",) if device == "trace" else ("memory", "time")
    for kind in kinds:
        for name, setting in chosen.items():
            if (kind, name) not in have and (kind == "memory" or setting.timed):
                room = room_bytes(setting, candidate_of(setting))
                yield Task(name=name, kind=kind, setting=setting, room=room)


def line_of(task: Task, device: Device) -> Line:
    """What the plan says beside what was measured, in this process."""
    # a trace has torch's operators, for those of Triton compute nothing without numbers
    setting, kernels = task.setting, "torch" if device == "trace" else "auto"
    way = candidate_of(setting, kernels=kernels)
    if task.kind == "time":
        records = calibrate(setting, device)
        return {
            "uncalibrated_s": way.seconds,
            "planned_s": calibrated_s(setting, records),
            **measure_time(setting, device),
            "records": records,
        }
    measured = measure_trace(setting) if device == "trace" else measure_memory(setting, device)
    return {"kernels": kernels, "planned": planned(way.needs[0].memory), "measured": measured}


def run_all(
    wanted: list[Task], device: Device, *, seconds: float, at_once: int, write: Callable[[Line], None]
) -> list[str]:
    """Run tasks in turn, several at a time where they share the room; returns the names of those left for want of time.

    Times are measured with nothing else on the card.
    """
    context, until = multiprocessing.get_context("fork"), time.monotonic() + seconds
    running: dict[Any, tuple[Task, Any, float]] = {}
    waiting = list(wanted)
    while waiting or running:
        while waiting and time.monotonic() < until and _may_begin(waiting[0], running, at_once):
            task = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(task, device, theirs))
            process.start()
            theirs.close()
            running[ours] = (task, process, time.monotonic())
        if not running:
            break
        for pipe in wait(list(running), timeout=0.2) or [p for p, r in running.items() if _is_late(r[2])]:
            task, process, begun = running.pop(pipe)
            write(_finished(task, process, pipe, begun))
    return [task.name for task in waiting]


def _may_begin(task: Task, running: Mapping[Any, tuple[Task, Any, float]], at_once: int) -> bool:
    others = [each for each, _, _ in running.values()]
    if task.kind == "time" or any(each.kind == "time" for each in others):
        return not others
    room = sum(each.room for each in others) + task.room
    return not others or (len(others) < at_once and room <= ROOM_GIB * GIB)


def _is_late(begun: float) -> bool:
    return time.monotonic() - begun > LIMIT_S


def _child(task: Task, device: Device, pipe: Any) -> None:
    try:
        pipe.send({"device": _name(device), **line_of(task, device)})
    except BaseException:  # noqa: BLE001 - whatever it is, it is the result of this setting
        pipe.send({"error": traceback.format_exc()[-3000:]})


def _name(device: Device) -> str:
    if device != "cuda":
        return device
    import torch

    return str(torch.cuda.get_device_name())


def _finished(task: Task, process: Any, pipe: Any, begun: float) -> Line:
    """The line of a process that has sent one, has died, or is late."""
    try:
        found = pipe.recv() if pipe.poll() else {"error": f"no answer within {LIMIT_S:g} s"}
    except EOFError:
        process.join()
        found = {"error": f"exit code {process.exitcode}"}
    process.join(timeout=5.0)
    if process.is_alive():
        process.kill()
        process.join()
    return {
        "kind": task.kind,
        "case": task.name,
        "seconds": round(time.monotonic() - begun, 2),
        **found,
    }


def import_everything(device: Device) -> None:
    """What settings need, without a CUDA context: peft would import bitsandbytes, which makes one."""
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
    hidden = device == "cuda" and "bitsandbytes" not in sys.modules
    if hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    import peft  # noqa: F401
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

    from gangline.worker import calibrate, session  # noqa: F401
    from gangline.worker.prefork import what_forbids_a_fork
    from gangline.worker.trace import line  # noqa: F401

    if hidden:
        del sys.modules["bitsandbytes"]
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU: --device trace compares with fake tensors")
    if device == "cuda" and (why := what_forbids_a_fork()):
        raise SystemExit(f"settings cannot be forked: {why}")


def origin() -> dict[str, Any]:
    """What the lines of this run have in common."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "triton"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"versions": versions, "commit": commit or "unknown"}


# Tables.


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Planned over measured, minus one."""

    each: tuple[float, ...]

    @property
    def words(self) -> str:
        """Mean of absolute ones, and the worst on both sides."""
        mean = fmean(map(abs, self.each))
        return f"{len(self.each)} rows, {mean:.1%} off in the mean, {min(self.each):+.1%} to {max(self.each):+.1%}"


def memory_errors(lines: Iterable[Line], what: str = "allocated") -> dict[str, float]:
    """By case, of lines that have this figure on both sides."""
    rows = [line for line in lines if line["kind"] == "memory" and what in line.get("measured", {})]
    return {line["case"]: line["planned"][what] / line["measured"][what] - 1 for line in rows}


def time_errors(lines: Iterable[Line], what: str = "planned_s") -> dict[str, float]:
    """By case."""
    return {line["case"]: line[what] / line["step_s"] - 1 for line in lines if "step_s" in line}


def show(lines: list[Line]) -> Iterator[str]:
    """The tables, with summaries."""
    yield "| setting | held | tensors: plan | measured | off | peak by plan, and measured | reserved: off |"
    yield "|---|---|---|---|---|---|---|"
    reserved = memory_errors(lines, "reserved")
    for line in lines:
        if line["kind"] == "memory" and "allocated" in line.get("measured", {}):
            plan, seen = line["planned"], line["measured"]
            tops = [max(each["instants"], key=each["instants"].__getitem__) for each in (plan, seen)]
            held = plan["held"] / seen["held"] - 1
            off = f"{reserved[line['case']]:+.1%}" if line["case"] in reserved else ""
            yield (
                f"| {line['case']} | {held:+.1%} | {plan['allocated'] / GIB:.2f} | {seen['allocated'] / GIB:.2f} "
                f"| {plan['allocated'] / seen['allocated'] - 1:+.1%} | {tops[0]}, {tops[1]} | {off} |"
            )
    for what in ("allocated", "reserved"):
        if found := memory_errors(lines, what):
            yield f"{what}: {Errors(each=tuple(found.values())).words}"
    if found := time_errors(lines):
        yield "\n| setting | step, s | calibrated plan | off | data sheet's plan | off |\n|---|---|---|---|---|---|"
        plain = time_errors(lines, "uncalibrated_s")
        for line in (line for line in lines if "step_s" in line):
            name = line["case"]
            yield (
                f"| {name} | {line['step_s']:.3f} | {line['planned_s']:.3f} | {found[name]:+.1%} "
                f"| {line['uncalibrated_s']:.3f} | {plain[name]:+.1%} |"
            )
        yield f"calibrated: {Errors(each=tuple(found.values())).words}"
    for line in lines:
        if "error" in line:
            yield f"failed: {line['case']} ({line['kind']}): {line['error'].strip().splitlines()[-1]}"


def read(path: Path) -> list[Line]:
    """The lines of a file, the last one of each case and kind that is no error; [] where there is none."""
    found: dict[tuple[str, str], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        line = json.loads(text)
        found[line["kind"], line["case"]] = line
    return list(found.values())


def main(argv: list[str]) -> int:
    """1 where a setting failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the file of lines")
    parser.add_argument("--seconds", type=float, default=180.0, help="no setting begins later (default 180)")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, metavar="SETTING", help=", ".join(SETTINGS))
    parser.add_argument("--device", choices=("cuda", "cpu", "trace"), default="cuda")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=f"settings at a time (default {AT_ONCE})")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    lines = read(options.out)
    if not options.show:
        import_everything(options.device)
        done = [(line["kind"], line["case"]) for line in lines if "error" not in line]
        wanted = list(tasks(options.only or SETTINGS, options.device, done=done))
        same = origin()

        def write(line: Line) -> None:
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, **same}) + "\n")

        left = run_all(wanted, options.device, seconds=options.seconds, at_once=options.at_once, write=write)
        if left:
            print(f"left for want of time: {', '.join(left)}")
        lines = read(options.out)
    print("\n".join(show(lines)))
    return 1 if any("error" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the processes do in test_trace: trace a case, and measure the same case while it really runs on the CPU."""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import sys
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from gangline.errors import GanglineError
from gangline.strategies.tensor_parallel.train import TensorParallelGroup, split_columns
from gangline.worker import loss
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.session import build_session
from gangline.worker.trace import line, steps
from gangline.worker.trace import steps as build
from gangline.worker.trace.__main__ import main
from gangline.worker.trace.configs import at_depth, is_even, read_config, shallow_depths
from gangline.worker.trace.line import count, trace
from gangline.worker.trace.order import TraceOrder
from gangline.worker.trace.steps import ByteTracker, trace_depth
from tests.train.small import make_world

_MEASURED = "the measured step"


class Rows:
    """Full rows of counting tokens, in as many documents as asked for."""

    def __init__(self, num_samples: int, *, length: int, num_documents: int) -> None:
        self.lengths = np.full(num_samples, length)
        self.label_counts = self.lengths - 1
        tokens = np.arange(length) % 64
        borders = np.linspace(0, length, num_documents + 1).astype(int)
        positions = np.concatenate([np.arange(end - start) for start, end in itertools.pairwise(borders)])
        self._row = SimpleNamespace(input_ids=tokens, targets=np.append(tokens[1:], -100), position_ids=positions)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int):
        return self._row


def at_one_depth(order: dict, *, layers: int) -> dict[str, int]:
    """The peaks by a trace of the whole depth, without a straight line."""
    parsed = TraceOrder.from_json(order)
    return trace_depth(read_config(parsed.config, None), layers, parsed).instants


def traced_peak(order: dict) -> int:
    """The largest of them."""
    return max(at_one_depth(order, layers=order["config"]["num_hidden_layers"]).values())


def extrapolated(order: dict, *, layers: int) -> list:
    """(By the straight line, by a trace of the whole depth) for the peak and every instant."""
    parsed = TraceOrder.from_json(order)
    result = trace(parsed)
    whole = at_one_depth(order, layers=layers)
    return [[result["peak_bytes"], max(whole.values())], *([result["instants"][name], whole[name]] for name in whole)]


def large(order: dict) -> dict:
    """A trace of a large model, and by how much this process grew for it, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = trace(TraceOrder.from_json(order))
    return {**result, "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def counted(order: dict) -> dict:
    return count(TraceOrder.from_json(order))


def answered(text: str, argv: list[str]) -> list:
    """What the program writes to stdout for this stdin while a library prints something, and its exit code."""
    own = line.read_config

    def chatty(*args, **kwargs):
        sys.stdout.write("a library says hello\n")
        os.write(1, b"and its C code, too\n")
        return own(*args, **kwargs)

    line.read_config, sys.stdin = chatty, io.StringIO(text)
    with tempfile.TemporaryFile() as stream:
        os.dup2(stream.fileno(), 1)
        code = main(argv)
        stream.seek(0)
        return [json.loads(stream.read()), code]


def trace_error(order: dict) -> dict | None:
    try:
        trace(TraceOrder.from_json(order))
    except GanglineError as error:
        return error.to_json()
    return None


def fused(config: dict, *, order: dict) -> list[bool]:
    """Whether the loss is fused: (by trying a real model with real numbers, by the trace)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tried = loss.CausalLoss(model, compute=torch.float32).fused
    return [tried, trace(TraceOrder.from_json({**order, "config": config}))["fused_loss"]]


def depths(config: dict) -> list:
    """(The shallow depths, whether a line through them meets the true depth, the layers' kinds at the second)."""
    parsed = read_config(config, None)
    chosen = shallow_depths(parsed)
    return [list(chosen), is_even(parsed, chosen), getattr(at_depth(parsed, chosen[1]), "layer_types", None)]


def counted_storages() -> dict[str, list[int]]:
    """Bytes that a tracker counts after every line of a short story, exact and in blocks."""
    story = {}
    for rounding in (1, 512):
        with FakeTensorMode(), ByteTracker(rounding_bytes=rounding) as tracker:
            tracker.instant("story")
            seen = [tracker.live_bytes]
            table = torch.zeros(100, 7)
            seen.append(tracker.live_bytes)  # 2800 bytes
            row = table.t()[3:]
            row.add_(1)
            seen.append(tracker.live_bytes)  # views and changes in place
            table.untyped_storage().resize_(0)
            seen.append(tracker.live_bytes)  # nothing
            table.untyped_storage().resize_(2800)
            del table
            seen.append(tracker.live_bytes)  # the view keeps it
            circle = [row, torch.zeros(10)]
            circle.append(circle)
            del row, circle
            seen.append(tracker.live_bytes)  # kept by a cycle until a collection
            tracker.instant("afterwards")
            seen.append(tracker.live_bytes)
            story[str(rounding)] = [*seen, tracker.peaks["story"]]
    return story


def profiled_peak(order: dict) -> int:
    """Bytes that torch's own allocator held at the most during the second step of a real run, by its profiler."""
    traced = TraceOrder.from_json(order)
    num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    shares = (traced.micro_batches,) * num_ranks
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable`", category=FutureWarning)
    with tempfile.TemporaryDirectory() as folder, _kernels(traced.attention_kernel):
        (Path(folder) / "config.json").write_text(json.dumps(traced.config))
        job = replace(traced.job(folder), batch=traced.micro_batch * sum(shares))
        rows = Rows(2 * job.batch, length=traced.sequence_length, num_documents=2 if traced.packing else 1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
            world = make_world(shares, rank=distributed.get_rank() if num_ranks > 1 else 0)
            session = build_session(job, world, train_set=rows, evaluation_set=None)
            outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
            steps = Synchronous(TrainingRun(session, outlets, progress))
            steps.advance()
            with record_function(_MEASURED):
                steps.advance()
    return _peak(profiler.profiler.kineto_results.events())


@contextmanager
def _kernels(kind: str):
    """The plain attention kernel and a GPU's chunks, for real."""
    if kind == "cpu":
        yield
        return
    own = loss.CHUNK_NUMBERS["cpu"]
    loss.CHUNK_NUMBERS["cpu"] = loss.CHUNK_NUMBERS["cuda"]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        loss.CHUNK_NUMBERS["cpu"] = own


def _peak(events) -> int:
    step = next(event for event in events if event.name() == _MEASURED)
    live, peak = 0, 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        if step.start_ns() <= event.start_ns() <= step.end_ns():
            peak = max(peak, live)
    return peak


class _Alone(TensorParallelGroup):
    """One of several ranks that have a model between them, without the others: what comes has the right shape."""

    def sum_up(self, terms):
        return terms.to(self.wire).clone().to(terms.dtype)

    def put_together(self, part):
        return torch.cat([part] * self.count, dim=-1)


def traced_slice(order: dict, *, parts: int) -> int:
    """The peak of one of so many ranks that have the model between them, without what other hosts are told."""
    own_model, own_loss, made = steps.build_model, build.CausalLoss, []

    def build_model(config, parsed):
        model, job, precision = own_model(config, parsed)
        side = _Alone(group=None, index=1, count=parts, wire=precision.compute)
        made.append(split_columns(model, side, None))
        return model, job, precision

    steps.build_model = build_model
    build.CausalLoss = lambda model, **words: own_loss(model, own_positions=made[-1].share, **words)
    try:
        return traced_peak(order)
    finally:
        steps.build_model, build.CausalLoss = own_model, own_loss

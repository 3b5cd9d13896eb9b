"""What the ranks do in test_offload."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Linear

from gangline.errors import GanglineError
from gangline.runs.job import StrategyJob
from gangline.strategies.fsdp.train import Fsdp
from gangline.worker import model as in_ram
from gangline.worker.batch import collate
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import gradient_norm, make_optimizer
from gangline.worker.precision import agree_precision
from gangline.worker.session import build_session
from gangline.worker.strategy import StrategySetup
from tests.train.small import MemorySet, make_job, make_session, make_world, model_folder, run_loop


def parts(shares, *, method: str, strategy: str):
    """Losses of some steps with what is in parts offloaded, split and alone; what FSDP2 says of where parts are."""
    both = ("optimizer", "parameters") if method == "full" else ("parameters",)
    asked = StrategyJob(kind=strategy, offload=both)
    job = make_job(method=method, steps=4, strategy=asked, activation_checkpointing=True)
    session = make_session(job, make_world(shares, rank=dist.get_rank(), strategy=strategy), num_evaluation=3)
    _, split = run_loop(session)
    if dist.get_rank():
        return None
    _, alone = run_loop(make_session(job, make_world([sum(shares)], rank=0), num_evaluation=3))
    return {"split": split.steps, "alone": alone.steps, "offloaded": _offloaded(session.loss)}


def inputs(*, method: str, shares, strategy: str):
    """Losses of some steps with layers' inputs kept as copies elsewhere, and as they are; what was copied."""
    job = make_job(method=method, precision="fp32", steps=4, dropout=0.0, activation_checkpointing=True)
    world = make_world(shares, rank=dist.get_rank(), strategy=strategy)
    _, plain = run_loop(make_session(job, world, num_evaluation=0))
    moved, back = [], []

    def to_ram(tensor):
        moved.append(tuple(tensor.shape))
        return tensor.device, tensor.detach().numpy().copy()

    def from_ram(kept):
        back.append(kept[1].shape)
        return torch.from_numpy(kept[1])

    with patch.multiple(in_ram, to_ram=to_ram, from_ram=from_ram):
        _, found = run_loop(make_session(replace(job, activation_offloading=True), world, num_evaluation=0))
    return {"plain": plain.steps, "found": found.steps, "moved": moved, "back": back}


def not_there():
    """Why inputs of a model without recomputation of transformers' kind are not moved, and what stays on a CPU."""
    tensor = torch.ones(3)
    device, kept = in_ram.to_ram(tensor)
    try:
        in_ram.keep_inputs_in_ram(Linear(2, 2))
    except GanglineError as error:
        return {"said": str(error), "same": kept is tensor and in_ram.from_ram((device, kept)) is tensor}
    return None


def parts_of_a_card(*, method: str):
    """A step of one rank whose parts lie in pinned memory, against the same model on the processor."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    job = make_job(method=method, precision="fp32", dropout=0.0)
    precision = agree_precision(job, torch.device("cpu"), world_size=1)
    loss = CausalLoss(load_model(job, compute=torch.float32), compute=torch.float32)
    reference = CausalLoss(load_model(job, compute=torch.float32), compute=torch.float32)
    world = make_world([4], rank=0, strategy="fsdp", device="cuda")
    job = replace(job, strategy=replace(job.strategy, offload=("parameters",)))
    strategy = Fsdp(StrategySetup(job=job, world=world, precision=precision))
    strategy.wrap(loss)
    optimizer = make_optimizer(loss.model, job.optimizer)
    rows = [MemorySet(4, seed=9).sample(row) for row in range(4)]
    for row in rows:
        strategy.forward_backward(collate([row]).to(world.device), scale=0.25, last=row is rows[-1])
    (sum(reference(*collate([row]).tensors) for row in rows) * 0.25).backward()
    norm = gradient_norm(trainable(loss).values(), parts=strategy.shard_group)
    expected = gradient_norm(trainable(reference).values())
    optimizer.step()
    local = [each.to_local() for each in loss.parameters() if isinstance(each, DTensor)]
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, DTensor)]
    whole = strategy.full_state({name: each.detach() for name, each in trainable(loss).items()}, wanted=True)
    return {
        "norm": float(norm),
        "expected": float(expected),
        "pinned": all(each.is_pinned() for each in local),
        "states": sorted({str(each.to_local().device) for each in states}),
        "finite": all(bool(torch.isfinite(each).all()) for each in whole.values()),
        "offloaded": _offloaded(loss),
    }


def memory_of_a_card(*, offloading: bool):
    """The most that tensors take on a card in a step of long rows, and the loss."""
    job = make_job(method="lora", precision="fp32", dropout=0.0, steps=2, batch=2)
    job = replace(job, model=replace(job.model, path=model_folder(layers=48, max_position_embeddings=4096)))
    job = replace(job, activation_checkpointing=True, activation_offloading=offloading)
    rows = MemorySet(4, seed=1, longest=4000)
    session = build_session(job, make_world([2], rank=0, device="cuda"), train_set=rows, evaluation_set=None)
    torch.cuda.reset_peak_memory_stats()
    _, found = run_loop(session)
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "losses": [loss for _, loss, _ in found.steps],
        "inputs": 48 * int(rows.lengths.max()) * 32 * 4,
    }


def _offloaded(loss) -> list[bool]:
    """Of every divided parameter, whether FSDP2 keeps it in the machine's memory."""
    modules = [module for module in loss.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return [each.offload_to_cpu for group in groups for each in group.fsdp_params]

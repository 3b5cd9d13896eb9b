"""What a careful person writes for torchrun: DDP over gloo, saves on every host, goes on from what all hosts have.

Run by torchrun on each host (faults_torchrun.py). Every host gets

    ~/plug/step-<n>.pt      model and optimizer; the newest two, written aside and renamed
    /dev/shm/plug-pid       the rank's, for who watches; so that a full disk is no matter
    /dev/shm/plug-steps     "<pid> <ranks> <step> <loss> <digest of the weights>" per step

Batches depend on the step alone, so a step that is done again is the same step.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path.home() / "plug"
PID, LINES = Path("/dev/shm/plug-pid"), Path("/dev/shm/plug-steps")
EVERY = 20
"""Steps between two saves."""
PAUSE_S = 0.1
"""In each step, as if there were more to compute."""
TIMEOUT_S = 60
"""Of a collective: torch's own is half an hour."""
STEPS = 1_000_000
WIDTH = 256


def main() -> None:
    """One rank, until somebody ends it."""
    FOLDER.mkdir(exist_ok=True)
    PID.write_text(f"{os.getpid()}\n")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(1)
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4)
    step = resume(bare, optimizer)
    with LINES.open("a", buffering=1) as lines:
        while step < STEPS:
            loss = train(model, optimizer, step)
            step += 1
            lines.write(f"{os.getpid()} {dist.get_world_size()} {step} {loss} {digest(bare)}\n")
            if step % EVERY == 0:
                save(bare, optimizer, step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step; its loss on this rank."""
    chance = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    rows = torch.randn(32, WIDTH, generator=chance)
    time.sleep(PAUSE_S)
    loss = (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def digest(model: nn.Module) -> int:
    """Of all bits of its weights."""
    return sum(int(torch.hash_tensor(parameter.detach()).view(torch.int64)) for parameter in model.parameters())


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write aside, force it to the disk, rename; keep two."""
    aside = FOLDER / "step.new"
    with aside.open("wb") as stream:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        os.fsync(stream.fileno())
    aside.rename(FOLDER / f"step-{step}.pt")
    for old in sorted(saved())[:-2]:
        (FOLDER / f"step-{old}.pt").unlink()


def saved() -> list[int]:
    """Steps that this host has."""
    return [int(path.stem.removeprefix("step-")) for path in FOLDER.glob("step-*.pt")]


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest step that every host has; 0 where there is none."""
    newest = torch.tensor(max(saved(), default=0))
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    step = int(newest)
    if step:
        state = torch.load(FOLDER / f"step-{step}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return step


if __name__ == "__main__":
    main()

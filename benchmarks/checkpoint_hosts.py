"""Hosts that are folders of this computer, with checkpoints that tell their step: for kill_saves.py and corruptions.py.

What `gangline resume` does on hosts (gangline.provision.checkpoint_sources) works on them as it is. Its small
programs run in this
process, so that thousands of cases take minutes, and a kill can hit them at any point.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from gangline.errors import CheckpointError
from gangline.provision.checkpoint_sources import CheckpointHost, bring, find_checkpoint
from gangline.provision.trees import host_layout
from gangline.runs import checkpoints
from gangline.runs import checkpoints as disk
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import ByteProgress, CommandResult
from gangline.worker.checkpoint import LocalShard
from gangline.worker.restore import load_parts

RUN = "calm-otter-7"
IN_PARTS = ("upper", "lower")
"""Hosts of which each holds half of the state."""
PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    "gangline.runs.checkpoints": checkpoints.main,
}


def host_of(root: Path, name: str) -> Host:
    """A host of that name, with its work folder below `root`."""
    return Host(name=name, workdir=str(root / name), python=sys.executable)


def checkpoints_of(root: Path, name: str) -> Path:
    """Where that host has the checkpoints of the run."""
    return host_layout(host_of(root, name), RUN).checkpoints


def places_of(
    root: Path, names: Iterable[str], *, at: Callable[[str], None] = lambda _point: None
) -> dict[str, CheckpointHost]:
    """The hosts as a resume sees them. at: told before and after every act on one of them."""
    hosts = [host_of(root, name) for name in names]
    return {host.name: CheckpointHost(host=host, transport=Near(host, at=at)) for host in hosts}


def resume(
    root: Path, names: Sequence[str], *, at: Callable[[str], None] = lambda _point: None
) -> disk.CheckpointChoice:
    """Choose, adopt, and bring to every host what it lacks, as `gangline resume` does before it starts a gang."""
    places = places_of(root, names, at=at)
    choice = find_checkpoint(places, RUN)
    bring(places, RUN, choice, targets=list(names))
    return choice


class Near(LocalTransport):
    """The transport to such a host. at: told of "before a write", "after a write", and so of programs and copies."""

    _one_at_a_time = threading.Lock()
    """Their output is taken from the stdout of this process."""

    def __init__(self, host: Host, *, at: Callable[[str], None]) -> None:
        super().__init__(host)
        self._at = at

    def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
        """See `Transport.run`."""
        self._at("before a program")
        words = list(argv)
        program = PROGRAMS.get(words[words.index("-m") + 1]) if "-m" in words else None
        result = super().run(argv, **options) if program is None else self._run_here(program, words)
        self._at("after a program")
        return result

    def _run_here(self, program: Callable[[Sequence[str]], int], words: list[str]) -> CommandResult:
        said = io.StringIO()
        with self._one_at_a_time, contextlib.redirect_stdout(said):
            code = program(words[words.index("-m") + 2 :])
        return CommandResult(host=self.host, argv=tuple(words), returncode=code, stdout=said.getvalue(), stderr="")

    def write(self, path: PurePath, data: bytes) -> None:
        """See `Transport.write`."""
        self._at("before a write")
        super().write(path, data)
        self._at("after a write")

    def push(self, source: Path, target: PurePath, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.push`."""
        self._at("before a copy")
        super().push(source, target, on_progress=on_progress)
        self._at("after a copy")


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """The state at a step: every value tells the step."""
    return {
        "model.weight": torch.full((64, 257), float(step)),
        "model.bias": torch.full((257,), step, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(float(step)),
    }


def load_as_rank(root: Path, name: str, step: int) -> list[str]:
    """What is wrong with what a rank on that host would load; [] if it is the state of the step.

    Raises CheckpointError as the rank would.
    """
    return compare(disk.find_parts(checkpoints_of(root, name), step, host=name), step)


def pieces_of(step: int, host: str) -> list[LocalShard]:
    """What one of the hosts IN_PARTS has of that state: the upper or the lower rows."""
    pieces = []
    for name, tensor in tensors_of(step).items():
        whole = {"name": name, "shape": tuple(tensor.shape)}
        if tensor.ndim == 0:
            pieces.append(LocalShard(tensor=tensor, offsets=(), **whole))
            continue
        cut = len(tensor) // 2
        rows, first = (tensor[:cut], 0) if host == IN_PARTS[0] else (tensor[cut:], cut)
        pieces.append(LocalShard(tensor=rows, offsets=(first, *(0,) * (tensor.ndim - 1)), **whole))
    return pieces


def compare(parts: Sequence[tuple[Path, str]], step: int) -> list[str]:
    """Load parts; what is wrong with the state. Raises CheckpointError. parts: as `load_parts` takes them."""
    template = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(step).items()}
    state = load_parts(parts, template)
    same = all(torch.equal(template[name], tensor) for name, tensor in tensors_of(step).items())
    where = parts[0][0]
    return [] if same and state["step"] == step else [f"wrong: {where} holds another state than that of step {step}"]


def require_loadable(root: Path, names: Iterable[str], step: int) -> list[str]:
    """What is wrong with the state of a step on these hosts, after a resume that chose it."""
    wrong = []
    for name in names:
        try:
            wrong += load_as_rank(root, name, step)
        except CheckpointError as error:
            wrong.append(f"{name} cannot load step {step}: {error.what}; {error.seen}")
    return wrong

"""The warm pool: one process per rank position that outlives attempts, and forks the rank.

    python -m gangline.worker prefork CONTROL train JOB GANG ROOT

torchrun starts it in the place of a rank. It imports everything that a rank needs, starts no thread and touches no GPU,
and forks the rank. When the rank has ended, it tells the exit code and waits for the next position
(docs/decisions/0012). The first attempt may have its position from torchrun; every other one has it from a file.

    CONTROL/position-<k>.json            its position in its k-th attempt: {"words": ["train", JOB, GANG, ROOT],
                                     "ranks": [of this host, by local rank], "world_size": n,
                                     "meet": [address, port], "files": folder of rank-<r>.pid}
    CONTROL/standby                  there is no first position yet: it imports, writes ready-<local rank>, and waits
    CONTROL/hold                     a rank that ends well does not end it, either
    CONTROL/leave                    it ends
    <files>/rank-<r>.exit.json       {"pid": of the rank, "code": its exit code, or minus the number of a signal}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gangline.exporters import EXPORTERS
from gangline.runs.files import read_json
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.worker.rank_files import early

LONGEST_REST_S = 3600.0
"""A host agent ends what rests much sooner. This is for when there is none any more."""
_LOOK_S = 0.05
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)
"""Orders to the rank that may reach this process instead: its pid stands where the rank has not come yet."""
_PR_SET_PDEATHSIG = 1


def prefork_main(argv: list[str]) -> NoReturn:
    """Fork ranks until told to leave, and end with the exit code of the last rank."""
    from gangline.worker.prefork import import_for, what_forbids_a_fork

    control, *words = argv
    server = PreforkServer(Path(control), run=run_rank)
    position = first_position(Path(control), tuple(words))
    if position is not None:
        position.take()
        early(list(position.words[1:]))
    import_for(Path(words[1]), gang=Path(words[2]))
    obstacle = what_forbids_a_fork()
    position = position or server.stand_by()
    if position is None:
        _end(0)
    if obstacle:
        with (position.files / f"rank-{position.rank}.log").open("a") as log:
            log.write(f"no prefork process for the next attempt: {obstacle}\n")
        _end(run_rank(list(position.words)))
    # what lives for ever is kept out of every later collection, and its pages stay shared
    gc.collect()
    gc.freeze()
    _end(server.serve(position))


def run_rank(words: list[str]) -> int:
    """What `words` say; for a rank that trains it does not return."""
    from gangline.worker.train import train_main

    verb, *argv = words
    if verb != "train":
        raise ValueError(f"a prefork process forks only `train`, not {verb}")
    train_main(argv)


class PreforkServer:
    """Forks one rank after the other. run: does what a rank does, in the child, and gives its exit code."""

    def __init__(self, control: Path, *, run: Callable[[list[str]], int]) -> None:
        self._control = control
        self._run = run
        self._parent = os.getppid()
        self._child: int | None = None
        """The rank, as long as nobody else can have its pid."""
        self._leaves = False

    def stand_by(self) -> RankPosition | None:
        """Say that it is ready, and wait for the first position; None where there will be none. SIGTERM ends it."""
        (self._control / f"ready-{os.environ.get('LOCAL_RANK', '0')}").touch()
        return self._wait_for(1)

    def serve(self, position: RankPosition) -> int:
        """Rank after rank, from this position on; the exit code of the last, as of a shell."""
        # before the handlers: an order that came while nobody could take it must find a rank
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        following: RankPosition | None = position
        while following is not None:
            position = following
            code = self._one(position)
            following = self._following(position, code)
        return code if code >= 0 else 128 - code

    def _one(self, position: RankPosition) -> int:
        """Fork the rank of a position, and wait for its end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(position, parent=own)
        self._child = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        _, status = os.waitpid(pid, 0)
        self._child = None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = os.waitstatus_to_exitcode(status)
        self._tell_end(position, pid, code)
        return code

    def _be(self, position: RankPosition, *, parent: int) -> NoReturn:
        """Be the rank. Nothing of it may ever return into the loop of its parent."""
        code = 1
        try:
            _die_with(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in _PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            # not SIGUSR2: it waits until the rank can take it (`worker/process_group.py`)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            # `random` seeds itself anew after a fork; torch has the seed of any fresh process
            position.take()
            code = self._run(list(position.words))
        except BaseException:  # noqa: BLE001 - see above
            traceback.print_exc()
        finally:
            _end(code)

    def _tell_end(self, position: RankPosition, pid: int, code: int) -> None:
        try:
            write_record(position.files / f"rank-{position.rank}.exit.json", {"pid": pid, "code": code})
        except OSError as error:  # the host agent sees that it is gone, too
            sys.stderr.write(f"rank {position.rank} ended with {code}, which cannot be written: {error}\n")

    def _following(self, position: RankPosition, code: int) -> RankPosition | None:
        """The next position; None where there will be none."""
        if code == 0 and not (self._control / "hold").exists():
            # in this order: a host agent gives the position, and only then lets go
            return None if self._leaves else read_position(self._control, position.number + 1)
        return self._wait_for(position.number + 1)

    def _wait_for(self, number: int) -> RankPosition | None:
        deadline = time.monotonic() + LONGEST_REST_S
        while not self._leaves and os.getppid() == self._parent and time.monotonic() < deadline:
            if (
                self._control / "leave"
            ).exists() or not self._control.is_dir():  # no host agent: it was started by hand
                return None
            position = read_position(self._control, number)
            if position is not None:
                return position
            time.sleep(_LOOK_S)
        return None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._leaves = self._leaves or number == signal.SIGTERM
        if self._child is not None:
            os.kill(self._child, number)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The place of one process in one attempt."""

    number: int
    """Attempts of this process are counted from 1."""
    words: tuple[str, ...]
    """`train JOB GANG ROOT`"""
    rank: int
    files: Path
    """Where rank-<r>.pid and the like go."""
    environment: dict[str, str] = field(default_factory=dict)
    """What is different from that of the process; {}: nothing, torchrun has told it."""

    def take(self) -> None:
        """Let this process be that rank."""
        os.environ.update(self.environment)


def first_position(control: Path, words: tuple[str, ...]) -> RankPosition | None:
    """The host agent's word if there is one, else torchrun's; None on standby: it is still to come."""
    is_standby = (control / "standby").exists()
    told = read_position(control, 1)
    if told is not None or is_standby:
        return told
    _, _, gang, root = words
    described = Gang.load(Path(gang))
    files = RunLayout(Path(root), described.run_id).attempt(described.attempt)
    return RankPosition(number=1, words=words, rank=int(os.environ.get("RANK", "0")), files=files)


def read_position(control: Path, number: int) -> RankPosition | None:
    """The position of this process in its attempt `number`; None as long as there is none."""
    try:
        told = read_json(control / f"position-{number}.json")
    except FileNotFoundError:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank, (address, port) = int(told["ranks"][local]), told["meet"]
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(told["world_size"]),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(told["ranks"])),
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
        # rank 0 keeps the store; the launchers of these ranks may never have met
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return RankPosition(
        number=number,
        words=tuple(str(word) for word in told["words"]),
        rank=rank,
        files=Path(told["files"]),
        environment=environment,
    )


log = logging.getLogger(__name__)

LATER = (
    "gangline.worker.data.tokens",
    "torch.nn.parallel.distributed",
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
)
"""What a rank imports only when it needs it."""


def import_for(job: Path, *, gang: Path) -> None:
    """Import what the ranks of a job need. What cannot be imported is left to them: they say well what is wrong.

    gang: of an attempt; where that has not come yet, of any other one beside it.
    """
    with (
        _variable("OPENBLAS_NUM_THREADS", "1"),  # numpy's and scipy's BLAS start their threads when they are loaded
        _variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),  # torch.cuda.is_available does not wake the driver then
    ):
        importlib.import_module("gangline.worker.train")
        for module in LATER:
            importlib.import_module(module)
        for each in (lambda: _import_of_job(Job.load(job)), lambda: _import_of_gang(gang)):
            try:
                each()
            except Exception as error:  # noqa: BLE001 - a rank meets it again, and has words for it
                log.info("not imported beforehand: %s", error)


def what_forbids_a_fork() -> str:
    """Why a child of this process would not be what a fresh process is; "" where it would.

    A forked process has only the thread that forked it, whatever locks others held; and no GPU can be used in it once
    the driver was, before.
    """
    import torch

    from gangline.worker.process_group import open_files

    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        return f"importing has started threads ({num_threads - 1})"
    # a process has the device of CUDA's memory open from `cuInit` on
    if torch.cuda.is_initialized() or "/dev/nvidia-uvm" in open_files().values():
        return "importing has opened the GPUs' driver"
    return ""


def _import_of_gang(gang: Path) -> None:
    """The two halves of its strategy."""
    from gangline.worker.session import train_half

    beside = sorted(gang.parent.parent.glob(f"*/{gang.name}"), key=lambda path: path.stat().st_mtime)
    for path in [gang] if gang.exists() else beside[-1:]:
        train_half(Gang.load(path).strategy)


def _import_of_job(job: Job) -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from gangline.worker import compat
    from gangline.worker.model import load_config

    if job.compile:
        compat.COMPILER.get()
    if job.method.kind != "full":
        with _hidden("bitsandbytes"):
            importlib.import_module("peft")
    # code that comes with a model, or a talk with the hub, is for the rank
    if Path(job.model.path).is_dir() and not job.model.trust_remote_code:
        config = load_config(job.model)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # transformers compiles its 900 patterns of all models' weights at the first load, and keeps them: half a second
        get_checkpoint_conversion_mapping(config.model_type)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the first rank of the head writes
        for name in job.report.exporters:
            for module in EXPORTERS[name].modules:
                importlib.import_module(module)


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """It is not found. peft would import bitsandbytes, which opens the driver; `worker.nf4` needs nothing of peft's."""
    absent = module not in sys.modules
    if absent:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules[module]


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

"""The process from which every rank of the tests is forked, so that imports are paid for once.

It imports torch, transformers, peft, all of gangline's worker and its verbs (unless its third argument is `plain`),
starts no thread and opens no GPU's driver, for a process that is forked then can use none. Then it answers two requests on the socket whose descriptor is its first argument: fork a child that serves a channel of its
own, and reap one that has ended. At the socket whose descriptor is the second one, programs ask for processes that do
their work (forked_python.py).
It ends when pytest does.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import random
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

from tests.train.forked_python import Programs, die_with
from tests.train.messages import nccl_on_one_card, receive, send


def main() -> None:
    """Import everything, then serve until the socket closes."""
    die_with(os.getppid())
    control, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    programs = Programs(listener)
    if sys.argv[3:] != ["plain"]:
        _import_everything()
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        raise RuntimeError(f"the zygote must not have threads when it forks, but it has {num_threads}")
    # Objects that live for ever are kept out of every later collection, and their pages stay shared.
    gc.collect()
    gc.freeze()
    send(control, {"ready": os.getpid()})
    while True:
        ready, _, _ = select.select([control.fileno(), *programs.descriptors()], [], [])
        programs.attend(ready)
        if control.fileno() not in ready:
            continue
        try:
            request = receive(control)
        except EOFError:
            return
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            send(control, {"returncode": os.waitstatus_to_exitcode(status)})
        else:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            send(control, {"pid": _fork(control, descriptors[0], request)})


def _import_everything() -> None:
    import deepspeed
    import safetensors.torch
    import tokenizers
    import torch
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.launcher.api
    import torch.distributed.tensor.parallel
    import torch.nn.parallel
    import torch.profiler
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama

    import gangline.cli
    import gangline.config
    import gangline.strategies
    import gangline.worker

    with _without_bitsandbytes():
        import peft
    torch.set_num_threads(1)
    del deepspeed, peft, safetensors, tokenizers, transformers
    with _strict():
        for package in (gangline.worker, gangline.strategies, gangline.config, gangline.cli):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                # what is run by its name must not be there already; the last one would import `cli.main`
                if not module.name.endswith(("__main__", "cli.main", "cli.manual")) and _has_its_packages(module.name):
                    importlib.import_module(module.name)
        importlib.import_module("tests.train.small")
    # torchrun asks where it is called from: inspect then looks at the file of every module, once
    inspect.stack()


def _has_its_packages(module: str) -> bool:
    """Triton is there where torch was built for GPUs."""
    return not module.startswith("gangline.worker.kernels.") or importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def _without_bitsandbytes():
    """On a machine with a GPU it opens the driver when it is imported, as peft does: a rank that needs it imports it."""
    hides = Path("/dev/nvidiactl").exists()
    if hides:
        sys.modules["bitsandbytes"] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules["bitsandbytes"]


@contextlib.contextmanager
def _strict():
    """What the libraries say to each other is theirs to mend; what they say to our code is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module=r"(gangline|tests)\b")
        yield


def _fork(control: socket.socket, descriptor: int, request) -> int:
    own = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    code = 1
    try:
        control.close()
        die_with(own)
        _redirect(request["log"])
        _serve(socket.socket(fileno=descriptor), request.get("group"))
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)


def _serve(channel: socket.socket, group) -> None:
    if group:
        _join(group)
    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        send(channel, _answer(request))


def _join(group) -> None:
    import torch.distributed

    rank, world_size, device = group["rank"], group["world_size"], group["device"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    if device != "cpu":
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **nccl_on_one_card(rank))
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=torch.distributed.FileStore(group["store"], world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=group["timeout_s"]),
    )


def _answer(request) -> dict:
    try:
        _reset()
        module, _, name = request["function"].partition(":")
        with _strict():
            value = getattr(importlib.import_module(module), name)(**request["kwargs"])
        answer = {"value": value}
        json.dumps(answer)
    except BaseException:  # noqa: BLE001 - the test is told, whatever it was
        return {"error": traceback.format_exc()}
    return answer


def _reset() -> None:
    """What one case changed must not reach the next."""
    gc.collect()
    random.seed(0)
    if "torch" not in sys.modules:
        return
    import torch

    _leave_groups()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _leave_groups() -> None:
    """Destroy the process groups that earlier cases made, and their threads: all ranks are through with them.

    Those of device meshes stay: torch keeps a mesh for later DTensors of an equal one, and looks for its groups.
    """
    import torch.distributed

    if torch.distributed.is_initialized():
        world = torch.distributed.group.WORLD
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            if group is not world and not group.group_desc.startswith("mesh_"):
                torch.distributed.destroy_process_group(group)


if __name__ == "__main__":
    main()

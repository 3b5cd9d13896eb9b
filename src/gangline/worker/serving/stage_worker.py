"""`python -m gangline.worker stage FOLDER --address ADDRESS`: one stage of a served pipeline, behind the first one.

The first line of stdin is a JSON object with the key of the stages. The first line of stdout says the port at which it
waits for them. The first stage tells it what to load; then it takes what the stage before it gives, passes it through
its layers, and hands it on. It ends with its stdin, and with any connection: without one stage there are no answers.
Which stage it has missed it tells the first one before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gangline.errors import GanglineError, RunFailed, UsageError, error_summary
from gangline.worker.json_lines import write_line
from gangline.worker.serving.cache_plan import free_bytes, plan_cache
from gangline.worker.serving.endpoint import read_secret
from gangline.worker.serving.passes import LayerShapes
from gangline.worker.serving.stage_link import (
    LinkLost,
    LinkSilent,
    Message,
    StageLink,
    await_call,
    call_stage,
    listen_for_stages,
)
from gangline.worker.serving.stage_model import (
    ON_ONE_HOST,
    StageModel,
    StagePasses,
    empty_model,
    layer_seconds,
    model_sizes,
    open_stage,
    own_device,
    stage_shapes,
    try_batch,
)
from gangline.worker.trained import hush_libraries

log = logging.getLogger(__name__)

ACCEPT_S = 120.0
"""For the call of the stage before."""
TOLD_S = 60.0
"""For the first stage to end all, once it was told which one is missed."""


def stage_main(argv: list[str]) -> int:
    """Read the command line, and be a stage until the endpoint ends."""
    parser = argparse.ArgumentParser(prog="gangline.worker stage")
    parser.add_argument("folder", type=Path, help="the model folder, on this host")
    parser.add_argument("--address", required=True, help="of this host, at which the other stages reach it")
    parser.add_argument("--ports", type=int, nargs=2, help="the first and the last that it may listen at")
    parser.add_argument("--stay", action="store_true", help="go on when stdin ends: who started it ends it")
    words = parser.parse_args(argv)
    key = read_secret(sys.stdin.readline(), "stage_key")
    hush_libraries()
    listener = listen_for_stages(words.address, tuple(words.ports) if words.ports else None)
    write_line("listening", port=listener.getsockname()[1])
    if not words.stay:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    run_stage(listener, key, words.folder)
    return 0


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)  # the main thread may be within a pass


def run_stage(listener: socket.socket, key: str, folder: Path) -> None:
    """Be a stage of the model in a folder until a connection ends. listener: closed once all others are here."""
    worker = _StageWorker(listener, key, folder)
    try:
        worker.obey()
        worker.serve()
    except LinkLost:
        pass  # the endpoint has ended
    finally:
        worker.close()


class PreparedStage:
    """A stage while it is loaded, here or on another host: each step of it gives what the first stage has to know."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stage: StageModel
        self._shapes: LayerShapes
        self.number = 0
        """In the chain; 0: the first."""

    @functools.cached_property
    def _empty(self) -> Any:
        return empty_model(self._folder)

    def sizes(self) -> dict[str, Any]:
        """Of the whole model: see `model_sizes`. Raises ModelError."""
        return model_sizes(self._empty)

    def facts(self, *, num_rows: int) -> dict[str, Any]:
        """Free memory, and the time of a layer's products."""
        device = own_device()
        return {
            "device": str(device),
            "free_bytes": free_bytes(device),
            "layer_s": layer_seconds(self._empty, num_rows=num_rows),
        }

    def load(self, *, number: int, stages: list[int], num_rows: int, context: int | None) -> Any:
        """Read the layers, and plan their cache. Raises GanglineError."""
        self.number = number
        self._stage = open_stage(self._empty, self._folder, number=number, stages=tuple(stages))
        self._shapes = stage_shapes(self._stage)
        plan = plan_cache(
            self._stage,
            token_bytes=sum(each.token_bytes for each in self._shapes.values()),
            limit=getattr(self._stage.config.get_text_config(), "max_position_embeddings", None),
            context=context,
            num_parallel=num_rows,
        )
        return plan.to_json()

    def cache(self, *, num_rows: int, context: int) -> dict[str, Any]:
        """Try a batch, and take the cache. Raises GanglineError."""
        try_batch(self._stage, self._shapes)
        self.passes = StagePasses(self._stage, num_rows=num_rows, context=context, shapes=self._shapes)
        token_bytes = sum(each.token_bytes for each in self._shapes.values())
        return {"cache_bytes": token_bytes * (context + 1) * num_rows}

    def is_well(self) -> bool:
        """Whether no pass of it hangs."""
        passes: StagePasses | None = getattr(self, "passes", None)
        return passes is None or passes.is_well()

    @property
    def model(self) -> StageModel:
        """What was loaded."""
        return self._stage


class _StageWorker:
    def __init__(self, listener: socket.socket, key: str, folder: Path) -> None:
        self._listener, self._key = listener, key
        self._prepared = PreparedStage(folder)
        self._control: StageLink
        self._previous: StageLink | None = None
        self._next: StageLink | None = None
        self._ended = threading.Event()

    def obey(self) -> None:
        """Do what the first stage says until it says that answers begin. Raises LinkLost."""
        self._control = await_call(self._listener, self._key, until=lambda: False).beat(self._prepared.is_well)
        while True:
            head, _ = self._control.receive()
            if (do := head.pop("do")) == "begin":
                self._listener.close()
                return
            try:
                said = self._do(do, head)
            except LinkLost:
                raise
            except GanglineError as error:
                said = {"error": error.to_json()}
            except Exception as error:  # any that a library raises: the first stage tells it
                log.exception("a stage failed")
                failed = RunFailed("a stage failed", seen=error_summary(error), fix=ON_ONE_HOST)
                said = {"error": failed.to_json()}
            self._control.send(said or {})

    def _do(self, do: str, words: dict[str, Any]) -> dict[str, Any] | None:
        if do == "link":
            link = call_stage(words["host"], words["address"], words["port"], self._key)
            self._next = link.beat(self._prepared.is_well)
        elif do == "accept":
            deadline = time.monotonic() + ACCEPT_S
            self._previous = await_call(self._listener, self._key, until=lambda: time.monotonic() > deadline)
        elif do in {"facts", "load", "cache"}:
            found: dict[str, Any] = getattr(self._prepared, do)(**words)
            return found
        else:
            raise UsageError(f"a stage does not know {do}", seen="", fix="the hosts need the same gangline")
        return None

    def serve(self) -> None:
        """Take what comes, and hand it on. Raises LinkLost."""
        coming: queue.Queue[Message | LinkLost] = queue.Queue()  # no limit: an end is heard while a pass is worked on
        previous = self._previous or self._control
        threading.Thread(target=self._read, args=(previous, coming), daemon=True).start()
        if previous is not self._control:  # nothing comes there any more but its end
            threading.Thread(target=self._watch, daemon=True).start()
        while not isinstance(message := coming.get(), LinkLost):
            self._handle(*message)
        self._tell_lost(self._prepared.number - 1, message)

    def _tell_lost(self, number: int, error: LinkLost) -> None:
        """Tell the first stage which other one is missed, and wait for its end. Raises LinkLost."""
        if number == 0:
            raise error
        self._control.send({"lost": number, "silent": isinstance(error, LinkSilent), "seen": str(error)})
        self._ended.wait(TOLD_S)

    def _handle(self, head: dict[str, Any], given: torch.Tensor | None) -> None:
        passes, following = self._prepared.passes, self._next or self._control
        made, do = None, head["do"]
        if do == "open":
            passes.open()
        elif do == "close":
            passes.close(head["slot"])
        elif "error" not in head and given is not None:
            try:
                made = passes.pass_on(head["slots"], head["counts"], given)
            except Exception as error:  # out of memory, say: these answers fail, and their slots are closed
                log.exception("answers failed")
                head |= {"error": error_summary(error), "stage": self._prepared.number}
        if self._next is not None or do == "pass":
            try:
                following.send(head, made)
            except LinkLost as error:
                self._tell_lost(0 if following is self._control else self._prepared.number + 1, error)
                raise

    def _read(self, link: StageLink, coming: queue.Queue[Message | LinkLost]) -> None:
        try:
            while True:
                coming.put(link.receive())
        except LinkLost as error:
            if link is self._control:
                self._ended.set()
            coming.put(error)

    def _watch(self) -> None:
        with contextlib.suppress(LinkLost):
            self._control.receive()
        self._ended.set()
        self.close()

    def close(self) -> None:
        """End every connection; whoever waits for one hears it."""
        self._listener.close()
        for link in (getattr(self, "_control", None), self._previous, self._next):
            if link is not None:
                link.close()

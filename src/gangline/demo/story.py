"""The demo: the commands of a first day, one after the other, each shown before it is done.

Every step is the function behind the command that is shown; the only thing made for the demo is the text.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gangline import app
from gangline.demo.corpus import standard_library, write_corpus
from gangline.demo.files import write_files
from gangline.errors import RunFailed
from gangline.runs.cluster import Host
from gangline.runs.files import read_json
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.registry import read_record
from gangline.runs.state import RunState
from gangline.serve.model import chat_with_folder, export_model, find_saved
from gangline.sync.ask import ask_worker
from gangline.units import format_bytes, format_duration
from gangline.watch.follow import Update, View

CORPUS_BYTES = 700_000
STOP_STEP, KILL_STEP = 70, 100
QUESTION = "What does textwrap.wrap do?\n"


class Follow(Protocol):
    """Shows a run to its end."""

    def __call__(self, view: View, *, from_start: bool, on_update: Callable[[Update], None]) -> None:
        """`from_start=False`: what happened before is not shown again; `on_update` sees every update."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the demo plays and who watches."""

    home: Path
    folder: Path
    talk: app.Talk
    follow: Follow


def play(stage: Stage) -> None:
    """Tell the whole story. Raises GanglineError if any part of it fails."""
    started = time.monotonic()
    _write(stage)
    first = _train_and_stop(stage)
    _resume(stage, first)
    _export(stage, first.run_id, to=stage.folder / "pretrained")
    second = _tune(stage)
    adapter = stage.folder / "adapter"
    _export(stage, second.run_id, to=adapter)
    _ask(stage, adapter)
    _farewell(stage, first, second, duration_s=time.monotonic() - started)


def _write(stage: Stage) -> None:
    """A fresh folder with corpus, tokenizer, an untrained model, a cluster and two jobs."""
    shutil.rmtree(stage.folder, ignore_errors=True)
    entries = standard_library(limit_bytes=CORPUS_BYTES)
    write_corpus(stage.folder / "corpus", entries)
    write_files(stage.folder)
    size = sum(path.stat().st_size for path in (stage.folder / "corpus").iterdir())
    _head(
        stage, 1, f"a corpus: {len(entries)} documentation strings of Python's standard library, {format_bytes(size)}"
    )
    stage.talk.tick("training a tokenizer")
    here = Host(name="local", workdir=str(stage.home), python=sys.executable)
    with app.reach(app.load_cluster(None, stage.home), app.REAL) as transports:
        argv = ("scratch", str(stage.folder / "corpus" / "pages.jsonl"), "--to", str(stage.folder / "model"))
        size_words = ("--vocabulary", "1024", "--hidden", "128", "--context", "256")
        record = ask_worker(here, transports["local"], (*argv, *size_words), on_progress=lambda _record: None)
    stage.talk.say(f"a tokenizer of {record['vocabulary']} tokens and an untrained Llama of 4 layers in {stage.folder}")


def _train_and_stop(stage: Stage) -> RunLayout:
    files = f"{stage.folder}/pretrain.yaml --cluster {stage.folder}/cluster.yaml"
    _head(stage, 2, "train on three hosts with shares 3:2:1, and stop half-way", f"gangline train {files}")
    layout = app.train(_start(stage, "pretrain.yaml"), talk=stage.talk)
    stopped = False

    def stop_half_way(update: Update) -> None:
        nonlocal stopped
        steps = [record["step"] for record in update.records if record.get("kind") == "step"]
        if not stopped and max(steps, default=0) >= STOP_STEP:
            stopped = True
            stage.talk.say(f"$ gangline stop {layout.run_id}")
            with app.opened(layout.run_id, home=stage.home) as run:
                app.stop(run)

    _follow(stage, layout, on_update=stop_half_way)
    _require(layout, "stopped")
    return layout


def _resume(stage: Stage, layout: RunLayout) -> None:
    _head(stage, 3, "go on from the checkpoint of the stop; then pull a plug", f"gangline resume {layout.run_id}")
    app.resume(layout.run_id, home=stage.home, talk=stage.talk)
    killed = False

    def kill_a_rank(update: Update) -> None:
        nonlocal killed
        steps = [record["step"] for record in update.records if record.get("kind") == "step"]
        if not killed and max(steps, default=0) >= KILL_STEP:
            killed = True
            _kill_rank(stage, layout, host="pc2")

    _follow(stage, layout, from_start=False, on_update=kill_a_rank)
    _require(layout, "finished")


def _kill_rank(stage: Stage, layout: RunLayout, *, host: str) -> None:
    """What a crash does; nobody is asked to put it right."""
    with app.opened(layout.run_id, home=stage.home) as run:
        workdir = Path(run.cluster.host(host).workdir)
    attempt = RunLayout(workdir, layout.run_id).attempt(RunState.load(layout).attempt)
    for file in sorted(attempt.glob("rank-*.pid")):
        process = ProcessId.of(int(read_json(file)["pid"]))
        if process is not None and process.is_alive:
            stage.talk.say(f"$ kill -9 {process.pid}   # the rank on {host}; nobody resumes by hand")
            os.kill(process.pid, signal.SIGKILL)


def _tune(stage: Stage) -> RunLayout:
    files = f"{stage.folder}/tune.yaml --cluster {stage.folder}/cluster.yaml"
    _head(stage, 4, "tune it with LoRA on questions and answers", f"gangline train {files}")
    layout = app.train(_start(stage, "tune.yaml"), talk=stage.talk)
    _follow(stage, layout)
    _require(layout, "finished")
    return layout


def _export(stage: Stage, run_id: str, *, to: Path) -> None:
    stage.talk.say(f"$ gangline export {run_id} --to {to}")
    with app.opened(run_id, home=stage.home) as run:
        saved = find_saved(run_id, run.cluster, run.transports)
        record = export_model(saved, run.layout, to=to, on_text=stage.talk.tick)
    stage.talk.say(f"loaded again: logits differ by {record['max_logit_difference']:.2g} at the most")


def _ask(stage: Stage, adapter: Path) -> None:
    command = f"gangline chat {adapter} --prompt {QUESTION.strip()!r}"
    _head(stage, 5, "ask it (a minute of training on two cores makes sentences, not sense)", command)
    words = ("--plain", f"--prompt={QUESTION}", "--max-tokens", "48", "--temperature", "0.7")
    code = chat_with_folder(adapter, words)
    if code != 0:
        raise RunFailed("the model did not answer", seen=f"exit code {code}", fix=f"try it by hand: {command}")


def _farewell(stage: Stage, first: RunLayout, second: RunLayout, *, duration_s: float) -> None:
    _head(stage, 6, f"done in {format_duration(duration_s)}; everything is still there")
    if shutil.which("gangline") is None:
        stage.talk.say(f"  export PATH={Path(sys.executable).parent}:$PATH   # so that the shell finds gangline")
    for command, meaning in (
        ("gangline ps", "both runs"),
        (f"gangline chat {second.run_id}", "talk to the tuned model"),
        (f"gangline logs {first.run_id} --rank 1", "what the second host wrote"),
        (f"gangline train {stage.folder}/tune.yaml steps=60 method.rank=4", "the same on this computer alone, longer"),
        (f"tensorboard --logdir {stage.home}/hosts/pc1/runs", "the curves in a browser"),
        (f"rm -r {stage.home}", "remove all of it"),
    ):
        stage.talk.say(f"  {command}   # {meaning}")


def _start(stage: Stage, job: str) -> app.Start:
    return app.Start(home=stage.home, job=stage.folder / job, cluster=stage.folder / "cluster.yaml")


def _follow(
    stage: Stage,
    layout: RunLayout,
    *,
    from_start: bool = True,
    on_update: Callable[[Update], None] = lambda _update: None,
) -> None:
    with app.opened(layout.run_id, home=stage.home) as run:
        stage.follow(run.view(), from_start=from_start, on_update=on_update)


def _require(layout: RunLayout, phase: str) -> None:
    record = read_record(layout)
    if record.phase != phase:
        raise RunFailed(
            f"{layout.run_id} is {record.phase}", seen=f"expected {phase}", fix=f"gangline logs {layout.run_id}"
        )


def _head(stage: Stage, number: int, title: str, command: str = "") -> None:
    stage.talk.say("")
    stage.talk.say(f"[{number}/6] {title}")
    if command:
        stage.talk.say(f"$ {command}")

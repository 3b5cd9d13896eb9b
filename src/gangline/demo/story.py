"""The demo: the commands of a first day, one after the other, each shown before it runs.

Every step is the function behind the command that is shown; only the text is made for the demo.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gangline import app
from gangline.context import REAL, StartOptions, load_cluster, reach
from gangline.control.end import stop
from gangline.control.supervision import open_run
from gangline.errors import RunFailed
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.provision.console import Console
from gangline.report.follow import Update, View
from gangline.runs.files import read_json
from gangline.runs.layout import RunLayout
from gangline.runs.registry import read_record
from gangline.runs.state import ProcessId, RunState
from gangline.serve.run_model import chat_with_folder, export_model, find_saved
from gangline.units import format_bytes, format_duration

_SHORTEST = 60
# Tests and generated tables have no prose.
_PASSED_OVER = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "turtledemo"}


def standard_library(*, limit_bytes: int) -> list[tuple[str, str]]:
    """Name (such as textwrap.wrap) and documentation string of public modules, classes and functions of the standard
    library, until there are `limit_bytes` of text.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    entries: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _PASSED_OVER.isdisjoint(parts) and not any(part.startswith("_") for part in parts):
            with suppress(OSError, SyntaxError, UnicodeDecodeError):
                entries += _documented(ast.parse(path.read_text(encoding="utf-8")), ".".join(parts))
        if sum(len(text) for _, text in entries) >= limit_bytes:
            break
    return entries


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        if len(text) >= _SHORTEST:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}")


def first_sentence(text: str) -> str:
    """The first paragraph on one line, up to its first full stop."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return paragraph.split(". ", 1)[0].rstrip(".") + "."


def write_corpus(folder: Path, entries: Sequence[tuple[str, str]], *, every: int = 12) -> None:
    """Write pages.jsonl, held_out.jsonl (every twelfth page) and questions.jsonl (prompt, completion)."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = [{"text": f"{name}\n\n{text}"} for name, text in entries]
    _write_lines(folder / "pages.jsonl", (page for index, page in enumerate(pages) if index % every))
    _write_lines(folder / "held_out.jsonl", pages[::every])
    answers = ((name, first_sentence(text)) for name, text in entries)
    questions = (
        {"prompt": f"What does {name} do?\n", "completion": answer} for name, answer in answers if len(answer) < 200
    )
    _write_lines(folder / "questions.jsonl", questions)


def _write_lines(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


# The files that a user would write.

CLUSTER = """\
# Three hosts on this one computer. Each has a work folder and ranks of its own, as three machines would.
name: three-on-one
hosts:
  - {name: pc1, transport: local, share: 3, gpu: none}
  - {name: pc2, transport: local, share: 2, gpu: none}
  - {name: pc3, transport: local, share: 1, gpu: none}
"""

PRETRAIN = """\
# A small Llama from nothing, on the documentation strings of Python's standard library.
name: demo-pretrain
model: {path: ./model, start: random}
data:
  train: corpus/pages.jsonl
  eval: corpus/held_out.jsonl
  format: text
  sequence_length: 128
batch: 24          # samples in one optimizer step, over all hosts
micro_batch: 4
steps: 140
optimizer: {learning_rate: 4.0e-3, weight_decay: 0.1}
schedule: {kind: cosine, warmup_steps: 10}
evaluation: {every_steps: 70, max_samples: 72}
checkpoint: {every_steps: 35}
"""

TUNE = """\
# LoRA on the model above: a question in, one sentence out; trained on the answers only.
name: demo-tune
model: ./pretrained
method: {kind: lora, rank: 16, alpha: 32, dropout: 0.05}
data:
  train: corpus/questions.jsonl
  eval: 0.05
  format: completion
  sequence_length: 128
batch: 24
micro_batch: 4
steps: 45
optimizer: {learning_rate: 3.0e-3}
schedule: {kind: linear, warmup_steps: 5}
evaluation: {max_samples: 72}
"""


def write_files(folder: Path) -> None:
    """Write cluster.yaml, pretrain.yaml and tune.yaml."""
    for name, text in {"cluster.yaml": CLUSTER, "pretrain.yaml": PRETRAIN, "tune.yaml": TUNE}.items():
        (folder / name).write_text(text, encoding="utf-8")


CORPUS_BYTES = 700_000
STOP_STEP, KILL_STEP = 70, 100
QUESTION = "What does textwrap.wrap do?\n"


class Follow(Protocol):
    """Shows a run to its end."""

    def __call__(self, view: View, *, from_start: bool, on_update: Callable[[Update], None]) -> None:
        """`from_start=False`: earlier lines are not shown again; `on_update` sees every update."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoContext:
    """The folders of the demo, and its screen."""

    home: Path
    folder: Path
    console: Console
    follow: Follow


def run_demo(context: DemoContext) -> None:
    """Run all steps. Raises GanglineError if any of them fails."""
    started = time.monotonic()
    _write(context)
    first = _train_and_stop(context)
    _resume(context, first)
    _export(context, first.run_id, to=context.folder / "pretrained")
    second = _tune(context)
    adapter = context.folder / "adapter"
    _export(context, second.run_id, to=adapter)
    _ask(context, adapter)
    _finish(context, first, second, duration_s=time.monotonic() - started)


def _write(context: DemoContext) -> None:
    """A fresh folder with corpus, tokenizer, an untrained model, a cluster and two jobs."""
    shutil.rmtree(context.folder, ignore_errors=True)
    entries = standard_library(limit_bytes=CORPUS_BYTES)
    write_corpus(context.folder / "corpus", entries)
    write_files(context.folder)
    size = sum(path.stat().st_size for path in (context.folder / "corpus").iterdir())
    _head(
        context, 1, f"a corpus: {len(entries)} documentation strings of Python's standard library, {format_bytes(size)}"
    )
    context.console.progress("training a tokenizer")
    here = trainer_here(context.home)
    with reach(load_cluster(None, context.home), REAL) as transports:
        argv = ("scratch", str(context.folder / "corpus" / "pages.jsonl"), "--to", str(context.folder / "model"))
        size_words = ("--vocabulary", "1024", "--hidden", "128", "--context", "256")
        record = ask_worker(here, transports["local"], (*argv, *size_words), on_progress=lambda _record: None)
    context.console.report(
        f"a tokenizer of {record['vocabulary']} tokens and an untrained Llama of 4 layers in {context.folder}"
    )


def _train_and_stop(context: DemoContext) -> RunLayout:
    files = f"{context.folder}/pretrain.yaml --cluster {context.folder}/cluster.yaml"
    _head(context, 2, "train on three hosts with shares 3:2:1, and stop half-way", f"gangline train {files}")
    layout = app.train(_start(context, "pretrain.yaml"), console=context.console)

    def stop_run() -> None:
        context.console.report(f"$ gangline stop {layout.run_id}")
        with open_run(layout.run_id, home=context.home) as run:
            stop(run)

    _follow(context, layout, on_update=_once_at(STOP_STEP, stop_run))
    _require(layout, "stopped")
    return layout


def _once_at(step: int, action: Callable[[], None]) -> Callable[[Update], None]:
    """Act once, on the first update that has this step or a later one."""
    acted = False

    def on_update(update: Update) -> None:
        nonlocal acted
        steps = [record["step"] for record in update.records if record.get("kind") == "step"]
        if not acted and max(steps, default=0) >= step:
            acted = True
            action()

    return on_update


def _resume(context: DemoContext, layout: RunLayout) -> None:
    _head(context, 3, "go on from the checkpoint of the stop; then pull a plug", f"gangline resume {layout.run_id}")
    app.resume(layout.run_id, home=context.home, console=context.console)
    kill = _once_at(KILL_STEP, lambda: _kill_rank(context, layout, host="pc2"))
    _follow(context, layout, from_start=False, on_update=kill)
    _require(layout, "finished")


def _kill_rank(context: DemoContext, layout: RunLayout, *, host: str) -> None:
    """Kill a rank as a crash would; the run recovers by itself."""
    with open_run(layout.run_id, home=context.home) as run:
        workdir = Path(run.cluster.host(host).workdir)
    attempt = RunLayout(workdir, layout.run_id).attempt(RunState.load(layout).attempt)
    for file in sorted(attempt.glob("rank-*.pid")):
        process = ProcessId.of(int(read_json(file)["pid"]))
        if process is not None and process.is_alive:
            context.console.report(f"$ kill -9 {process.pid}   # the rank on {host}; nobody resumes by hand")
            os.kill(process.pid, signal.SIGKILL)


def _tune(context: DemoContext) -> RunLayout:
    files = f"{context.folder}/tune.yaml --cluster {context.folder}/cluster.yaml"
    _head(context, 4, "tune it with LoRA on questions and answers", f"gangline train {files}")
    layout = app.train(_start(context, "tune.yaml"), console=context.console)
    _follow(context, layout)
    _require(layout, "finished")
    return layout


def _export(context: DemoContext, run_id: str, *, to: Path) -> None:
    context.console.report(f"$ gangline export {run_id} --to {to}")
    with open_run(run_id, home=context.home) as run:
        saved = find_saved(run_id, run.cluster, run.transports)
        record = export_model(saved, run.layout, to=to, on_text=context.console.progress)
    context.console.report(f"loaded again: logits differ by {record['max_logit_difference']:.2g} at the most")


def _ask(context: DemoContext, adapter: Path) -> None:
    command = f"gangline chat {adapter} --prompt {QUESTION.strip()!r}"
    _head(context, 5, "ask it (a minute of training on two cores makes sentences, not sense)", command)
    words = ("--plain", f"--prompt={QUESTION}", "--max-tokens", "48", "--temperature", "0.7")
    code = chat_with_folder(adapter, words, home=context.home)
    if code != 0:
        raise RunFailed("the model did not answer", seen=f"exit code {code}", fix=f"try it by hand: {command}")


def _finish(context: DemoContext, first: RunLayout, second: RunLayout, *, duration_s: float) -> None:
    _head(context, 6, f"done in {format_duration(duration_s)}; everything is still there")
    if shutil.which("gangline") is None:
        context.console.report(
            f"  export PATH={Path(sys.executable).parent}:$PATH   # so that the shell finds gangline"
        )
    for command, meaning in (
        ("gangline ps", "both runs"),
        (f"gangline chat {second.run_id}", "talk to the tuned model"),
        (f"gangline logs {first.run_id} --rank 1", "what the second host wrote"),
        (
            f"gangline train {context.folder}/tune.yaml steps=60 method.rank=4",
            "the same on this computer alone, longer",
        ),
        (f"tensorboard --logdir {context.home}/hosts/pc1/runs", "the curves in a browser"),
        (f"rm -r {context.home}", "remove all of it"),
    ):
        context.console.report(f"  {command}   # {meaning}")


def _start(context: DemoContext, job: str) -> StartOptions:
    return StartOptions(home=context.home, job=context.folder / job, cluster=context.folder / "cluster.yaml")


def _follow(
    context: DemoContext,
    layout: RunLayout,
    *,
    from_start: bool = True,
    on_update: Callable[[Update], None] = lambda _update: None,
) -> None:
    with open_run(layout.run_id, home=context.home) as run:
        context.follow(run.view(), from_start=from_start, on_update=on_update)


def _require(layout: RunLayout, phase: str) -> None:
    record = read_record(layout)
    if record.phase != phase:
        raise RunFailed(
            f"{layout.run_id} is {record.phase}", seen=f"expected {phase}", fix=f"gangline logs {layout.run_id}"
        )


def _head(context: DemoContext, number: int, title: str, command: str = "") -> None:
    context.console.report("")
    context.console.report(f"[{number}/6] {title}")
    if command:
        context.console.report(f"$ {command}")

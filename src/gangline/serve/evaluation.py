"""The scores of a model on tasks, before and after training: asked of the worker where the model lies, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import UsageError
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.serve.run_model import SavedPart
from gangline.transport.local import LocalTransport

BASE = "base"
"""What a model is compared with: the one that it was trained from."""
TASK_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What is asked of every model alike."""

    tasks: tuple[str, ...]
    """Names of the harness, and absolute paths of YAML files."""
    limit: int | None = None
    seed: int = 0
    chat: bool = False

    @property
    def files(self) -> list[str]:
        """The tasks that are files of this computer."""
        return [each for each in self.tasks if Path(each).suffix in TASK_FILES]

    def words(self) -> list[str]:
        """The worker's options."""
        limit = [] if self.limit is None else [f"--limit={self.limit}"]
        chat = ["--chat"] if self.chat else []
        return [*(f"--task={each}" for each in self.tasks), *limit, f"--seed={self.seed}", *chat]


def read_tasks(given: Sequence[str]) -> tuple[str, ...]:
    """Tasks as they were typed, several with commas between them. Raises UsageError for none, and where a
    file is missing.
    """
    tasks = list(dict.fromkeys(each.strip() for text in given for each in text.split(",") if each.strip()))
    if not tasks:
        raise UsageError(
            "no task is named",
            seen="expected names of lm-evaluation-harness, or YAML files",
            fix="--tasks hellaswag,arc_easy or --tasks mine.yaml",
        )
    for each in tasks:
        if Path(each).suffix in TASK_FILES and not Path(each).is_file():
            raise UsageError(f"--tasks {each}", seen="there is no such file", fix="name a YAML file of a task")
    return tuple(str(Path(each).absolute()) if Path(each).suffix in TASK_FILES else each for each in tasks)


def evaluate_folder(
    folder: Path, asked: ScoreRequest, *, base: bool = False, home: Path, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """The scores of the model or adapter of a folder of this computer: the worker's record.

    base: those of the model that it was trained from. Raises the worker's own error.
    """
    here = trainer_here(home)
    words = ["evaluate", str(folder.absolute()), *asked.words(), *(["--base"] if base else [])]
    return _of_worker(ask_worker(here, LocalTransport(here), words, on_progress=_texts(on_text)))


def evaluate_saved(
    saved: SavedPart, asked: ScoreRequest, *, base: bool = False, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """The scores of the model of a checkpoint, on its host; see `evaluate_folder`."""
    host = saved.place.host
    if asked.files and host.transport != "local":
        raise UsageError(
            f"--tasks {Path(asked.files[0]).name} is a file of this computer",
            seen=f"the checkpoint lies on {host.name}",
            fix="gangline export writes the model here; evaluate that folder",
        )
    where = ["--run", str(saved.run_folder), "--checkpoint", str(saved.part)]
    words = ["evaluate", *where, *asked.words(), *(["--base"] if base else [])]
    return _of_worker(ask_worker(host, saved.place.transport, words, on_progress=_texts(on_text)))


def _texts(on_text: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    return lambda record: on_text(str(record.get("text", "")))


def _of_worker(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "kind"}


def beside(scores: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each score with the same one of another model: `before`, `before_stderr` and `change`, None where one is none."""
    known = {_key(each): each for each in before}
    found = []
    for each in scores:
        other = known.get(_key(each), {})
        one, two = each["value"], other.get("value")
        change = None if one is None or two is None else one - two
        found.append({**each, "before": two, "before_stderr": other.get("stderr"), "change": change})
    return found


def _key(score: Mapping[str, Any]) -> tuple[Any, ...]:
    return score["task"], score["metric"], score["filter"]


def score_rows(scores: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of scores; with `before` and `change` where they were compared."""
    compared = any("before" in each for each in scores)
    header = ["task", "score", "value", *(["before", "change"] if compared else []), "samples"]
    rows = []
    for each in scores:
        better = {True: " (higher is better)", False: " (lower is better)"}.get(each["higher_is_better"], "")
        name = f"{each['metric']}{', ' + each['filter'] if each['filter'] else ''}{better}"
        row = [each["task"], name, _figure(each["value"], each["stderr"])]
        if compared:
            row += [_figure(each["before"], each["before_stderr"]), _change(each)]
        rows.append([*row, "" if each["samples"] is None else f"{each['samples']:,}"])
    return header, rows


def _figure(value: float | None, error: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _change(score: Mapping[str, Any]) -> str:
    """The change, and its size in standard errors of a difference of two independent scores."""
    if score["change"] is None:
        return ""
    errors = [score["stderr"], score["before_stderr"]]
    if any(each is None for each in errors) or not (spread := math.hypot(*errors)):
        return f"{score['change']:+.4g}"
    return f"{score['change']:+.4g} ({abs(score['change']) / spread:.1f} standard errors)"

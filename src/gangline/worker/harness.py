"""`python -m gangline.worker evaluate FOLDER | --run RUN --checkpoint PART --task NAME|FILE`: scores of a model.

lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) asks the model and computes the scores.
Requests go to the model one at a time, so none is padded to the length of another one and a score does not depend on
its neighbours; standard errors by resampling have a fixed seed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.errors import RunFailed, UsageError, error_summary
from gangline.worker.generate import Speaker, lacks_memory, open_base, open_folder, open_run
from gangline.worker.json_lines import write_line
from gangline.worker.trained import hush_libraries

RESAMPLES = 1000
"""For the standard errors of scores that have no formula, such as a perplexity."""
TASK_FILES = (".yaml", ".yml")
MOST_SEEN = 400


def evaluate_main(argv: list[str]) -> int:
    """Read the command line, load the tasks, then the model, and write its scores as one JSON line."""
    words = _parse(argv)
    _require_harness()
    hush_libraries()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # or the harness forks this process for every resampled score
    write_line("progress", text="reading the tasks")
    tasks = load_tasks(words.task)
    write_line("progress", text="loading the model")
    write_line("result", **scores(_open(words), tasks, limit=words.limit, seed=words.seed, chat=words.chat))
    return 0


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Tasks and groups of the harness, by its names or by YAML files; paths in a file are relative to its folder.

    Raises UsageError for one that cannot be loaded, and for two of the same name.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=not all(map(_is_file, names)))
    found: dict[str, Any] = {}
    for name in names:
        place = Path(name).parent if _is_file(name) else Path()
        try:
            with _folder(place):
                loaded = manager.load([Path(name).name if _is_file(name) else name])
        except Exception as error:  # whatever a task, its data and its code raise
            raise _no_task(name, error) from error
        inner = {each for children in loaded["group_map"].values() for each in children}
        given = {key: each for key, each in {**loaded["groups"], **loaded["tasks"]}.items() if key not in inner}
        if twice := [key for key in given if key in found]:
            raise UsageError(
                f"--tasks {name}: there are two tasks {twice[0]}", seen="expected each name once", fix="rename one"
            )
        found |= given
    return list(found.values())


def scores(
    speaker: Speaker, tasks: Sequence[Any], *, limit: int | None = None, seed: int = 0, chat: bool = False
) -> dict[str, Any]:
    """The scores of a model: a row per task, score and filter, and how they were computed.

    limit: samples of each task, from its beginning. chat: prompts by the chat template. Raises UsageError where the
    model has none, RunFailed where the harness or the model fails.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    if chat and speaker.form != "chat":
        raise UsageError(
            "--chat: this model was not trained with a chat template",
            seen="expected a tokenizer with chat_template, and chats as training data",
            fix="leave --chat out",
        )
    model = HFLM(pretrained=speaker.model, tokenizer=speaker.tokenizer, batch_size=1, softmax_dtype="float32")
    for verb in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(model, verb, _told(verb, getattr(model, verb)))
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
            apply_chat_template=chat,
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
            **seeds,
        )
    except Exception as error:
        raise _failed(error) from error
    return {"scores": _rows(found), "limit": limit, "seed": seed, "chat": chat, "lm_eval": lm_eval.__version__}


def _told(verb: str, ask: Any) -> Any:
    """A verb of the harness's model that says how much it is asked, in place of a bar on stderr."""

    def told(requests: Sequence[Any], **_: Any) -> Any:
        write_line("progress", text=f"{len(requests):,} requests: {verb}")
        return ask(requests, disable_tqdm=True)

    return told


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for key, value in values.items():
            name, comma, chosen = key.partition(",")
            if not comma or name.endswith("stderr") or not isinstance(value, (int, float)):
                continue
            rows.append(
                {
                    "task": task,
                    "metric": name,
                    "filter": "" if chosen == "none" else chosen,
                    "value": _finite(value),
                    "stderr": _finite(values.get(f"{name}_stderr,{chosen}")),
                    "higher_is_better": found["higher_is_better"].get(task, {}).get(name),
                    "samples": (found["n-samples"].get(task) or {}).get("effective"),
                    "shots": found["n-shot"].get(task),
                }
            )
    return rows


def _finite(value: Any) -> float | None:
    """A figure that JSON can hold; None for "N/A", NaN and infinity."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _open(words: argparse.Namespace) -> Speaker:
    if words.base:
        return open_base(folder=words.folder, run=words.run, part=words.checkpoint)
    return open_run(words.run, words.checkpoint) if words.run else open_folder(words.folder)


def _is_file(name: str) -> bool:
    return Path(name).suffix in TASK_FILES


@contextlib.contextmanager
def _folder(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def _no_task(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"--tasks {name}: this task cannot be loaded",
        seen=error_summary(error)[:MOST_SEEN],
        fix="paths in a task file are relative to the folder of the file"
        if _is_file(name)
        else "`lm_eval ls tasks` lists the names; their data come from the hub, for which the host of the model needs "
        "the internet. Without it, name a YAML file of a task over local files",
    )


def _failed(error: Exception) -> RunFailed:
    if lacks_memory(error):
        return RunFailed(
            "the device has no memory left for this evaluation",
            seen=error_summary(error)[:MOST_SEEN],
            fix="end what else runs there, or take tasks with shorter texts",
        )
    return RunFailed(
        "the harness cannot evaluate these tasks",
        seen=error_summary(error)[:MOST_SEEN],
        fix="try the tasks one by one: an error in a task's own file or data is told here, too",
    )


def _require_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "lm_eval cannot be imported, which gangline evaluate needs",
            seen=f"not among the packages of {sys.executable}",
            fix="into that Python: pip install 'gangline[evaluate]'",
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gangline.worker evaluate")
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder, or an adapter's")
    parser.add_argument("--run", type=Path, help="a run directory, instead of a folder")
    parser.add_argument("--checkpoint", type=Path, help="a part of a committed checkpoint of that run")
    parser.add_argument("--base", action="store_true", help="the model that it was trained from, in its place")
    parser.add_argument("--task", action="append", required=True, help="a name of the harness, or a YAML file")
    parser.add_argument("--limit", type=int, help="samples of each task")
    parser.add_argument("--seed", type=int, default=0, help="of samples in the prompt, and of drawn answers")
    parser.add_argument("--chat", action="store_true", help="prompts by the chat template")
    words = parser.parse_args(argv)
    if bool(words.run) == bool(words.folder) or bool(words.run) != bool(words.checkpoint):
        raise UsageError(
            "evaluate needs one model",
            seen="expected FOLDER, or --run with --checkpoint",
            fix="python -m gangline.worker evaluate --help",
        )
    return words

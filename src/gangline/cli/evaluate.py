"""`gangline evaluate RUN|FOLDER`: scores of a model, before and after training."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, print_data, print_json
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.report.text_table import table
from gangline.runs.files import write_json
from gangline.serve.evaluation import (
    BASE,
    ScoreRequest,
    beside,
    evaluate_folder,
    evaluate_saved,
    read_tasks,
    score_rows,
)
from gangline.serve.run_model import complete, find_saved, is_model_folder


def command(  # noqa: PLR0913  (options of a command line)
    target: Annotated[str, argument("RUN|FOLDER", "a run, or a folder with a model or adapter")],
    tasks: Annotated[
        list[str], option("a task of lm-evaluation-harness, or a YAML file of one; more than once", "NAME|FILE")
    ],
    against: Annotated[
        str | None, option("score this one too, and compare: `base`, another run, or a folder", "base|RUN|FOLDER")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="samples of each task; by default all")] = None,
    seed: Annotated[int, option("seed of the samples that are shown in prompts, and of drawn answers")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="write prompts by the model's chat template")] = False,
    as_json: AsJson = False,
) -> None:
    """Score the newest checkpoint of a run, or a model folder, on tasks of lm-evaluation-harness.

    It runs where the model lies. Scores of a run are kept in its folder, too.
    """
    console = Terminal()
    asked = ScoreRequest(tasks=read_tasks(tasks), limit=limit, seed=seed, chat=chat)
    record = _scores(target, asked, base=False, console=console)
    if against is not None:
        where, base = (target, True) if against == BASE else (against, False)
        other = _scores(where, asked, base=base, console=console)
        record = {**record, "against": other["model"], "scores": beside(record["scores"], other["scores"])}
    console.clear()
    kept = _keep(record)
    if as_json:
        print_json(record)
    else:
        print_data(table(*score_rows(record["scores"])))
        compared = f", before: {record['against']}" if against is not None else ""
        console.report(f"{record['model']}{compared}, by lm_eval {record['lm_eval']}, seed {seed}")
    if kept is not None:
        console.report(f"written: {kept}")


def _scores(target: str, asked: ScoreRequest, *, base: bool, console: Terminal) -> dict[str, Any]:
    """The worker's record of one model, with what it was: `model`, and `folder` and `step` of a run."""

    def tell(text: str) -> None:
        console.progress(f"{f'base of {target}' if base else target}: {text}")

    if is_model_folder(Path(target)):
        found = evaluate_folder(Path(target), asked, base=base, home=default_home(), on_text=tell)
        return {"model": f"the base of {target}" if base else target, **found}
    with open_run(target, home=default_home()) as opened:
        require_job(opened.layout)
        tell("verifying the checkpoint")
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports)
        complete(saved, opened.layout.run_id, console=console)
        found = evaluate_saved(saved, asked, base=base, on_text=tell)
    name = opened.layout.run_id
    model = f"the base of {name}" if base else f"step {saved.step} of {name}"
    return {"model": model, "step": saved.step, "evaluations": str(opened.layout.evaluations), **found}


def _keep(record: dict[str, Any]) -> Path | None:
    """Write the scores of a run into its folder here; None for a model folder, which is not changed."""
    folder, step = record.pop("evaluations", None), record.get("step")
    if folder is None:
        return None
    now = datetime.now(timezone.utc)
    path = Path(folder) / f"step-{step}-{now:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema_version": 1, **record})
    return path

"""`gangline export RUN|FOLDER`: write the model for transformers and peft, and for llama.cpp and Ollama."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import argument, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.errors import UsageError
from gangline.report.commands import joined, quoted
from gangline.runs.job import Job
from gangline.serve.gguf_export import FORMS, gguf_folder, lost_lines, refuse_forms
from gangline.serve.run_model import export_argv, export_model, find_saved, is_model_folder


def command(  # noqa: PLR0913  (options of a command line)
    run: Annotated[str, argument("RUN|FOLDER", "a run; with --gguf also a folder with a whole model")],
    merged: Annotated[
        bool, typer.Option("--merged", help="merge the adapter into the model and write the whole model")
    ] = False,
    to: Annotated[Path | None, option("new folder to write; by default below the run directory", "DIR")] = None,
    step: Annotated[int | None, option("by default the newest checkpoint")] = None,
    gguf: Annotated[
        list[str] | None, option(f"write the whole model for llama.cpp and Ollama, too: {', '.join(FORMS)}", "FORM")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="compare the logits of each GGUF file, and say what was lost")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact command and write nothing")] = False,
) -> None:
    """Write the model of a run, load it again and compare its logits. Prints the folder on stdout."""
    console, forms = Terminal(), tuple(gguf or ())
    refuse_forms(forms, check=check)
    if forms and is_model_folder(Path(run)):
        if merged or dry_run or step is not None:
            raise UsageError(
                "--merged, --step and --dry-run are for runs",
                seen=f"{run} is a folder with a model",
                fix="leave them out",
            )
        _convert(Path(run), to or _beside(Path(run)), forms, check=check, console=console)
        return
    with open_run(run, home=default_home()) as opened:
        require_job(opened.layout)
        merged = merged or (bool(forms) and Job.load(opened.layout.job).method.kind != "full")
        console.progress("verifying the checkpoint")
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports, step=step)
        if dry_run:
            console.clear()
            words = export_argv(saved, to=to, merged=merged)
            print_data([joined(saved.place.host.argv("-m", "gangline.worker", *words))])
            return
        console.report(f"exporting step {saved.step} of {opened.layout.run_id}")
        record = export_model(saved, opened.layout, to=to, merged=merged, on_text=console.progress)
    difference = record["max_logit_difference"]
    compared = (
        "every tensor is what was saved" if difference is None else f"logits differ by {difference:.2g} at the most"
    )
    console.report(f"{'read' if difference is None else 'loaded'} again: {compared}")
    print_data([record["folder"]])
    console.report(f"talk to it: gangline chat {quoted(record['folder'])}")
    if forms:
        folder = Path(record["folder"])
        _convert(folder, _beside(folder), forms, check=check, console=console)


def _beside(folder: Path) -> Path:
    """Where the GGUF files of a model folder lie."""
    whole = folder.absolute()
    return whole.with_name(f"{whole.name}-gguf")


def _convert(folder: Path, to: Path, forms: tuple[str, ...], *, check: bool, console: Terminal) -> None:
    record = gguf_folder(folder, to, forms, check=check, home=default_home(), console=console)
    console.clear()
    for line in lost_lines(record):
        console.report(line)
    print_data([record["folder"]])
    if "Modelfile" in record["files"]:
        console.report(f"with Ollama: ollama create NAME -f {quoted(str(Path(record['folder']) / 'Modelfile'))}")

"""`gangline export RUN|FOLDER`: write the model for transformers, peft, llama.cpp and Ollama; send it to the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.cli.options import argument, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.model_card import write_card
from gangline.control.recorded_run import records_of_opened
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import require_job
from gangline.errors import UsageError
from gangline.report.commands import joined, quoted
from gangline.runs.files import read_json
from gangline.runs.job import Job
from gangline.runs.layout import ADAPTER_CONFIG, EXPORT_NOTE, MODEL_CARD
from gangline.serve.gguf_export import FORMS, gguf_folder, lost_lines, refuse_forms
from gangline.serve.push import (
    files_of,
    is_adapter_folder,
    look_at_hub,
    note_of,
    others_in,
    refuse_local_base,
    refuse_public,
    refuse_push,
    send_folder,
)
from gangline.serve.run_model import (
    SavedPart,
    export_argv,
    export_model,
    exported_folder,
    find_saved,
    is_model_folder,
)
from gangline.units import format_bytes


def command(  # noqa: PLR0913  (options of a command line)
    run: Annotated[str, argument("RUN|FOLDER", "a run; with --gguf or --push also a folder with a model")],
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
    push: Annotated[str | None, option("send the folder to this repository of the Hugging Face hub", "NAME")] = None,
    private: Annotated[
        bool, typer.Option("--private", help="with --push: make the repository private if it is new")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="with --push: write beside other files there without a question")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be done and write nothing")] = False,
) -> None:
    """Write the model of a run, load it again and compare its logits. Prints the folder on stdout."""
    console, forms = Terminal(), tuple(gguf or ())
    refuse_forms(forms, check=check)
    pushing = _pushing(push, private=private, yes=yes, forms=forms, console=console)
    if (forms or pushing) and is_model_folder(Path(run)):
        if merged or step is not None or (dry_run and not pushing):
            raise UsageError(
                "--merged, --step and --dry-run are for runs",
                seen=f"{run} is a folder with a model",
                fix="leave them out",
            )
        if pushing:
            _push_folder(Path(run), pushing, dry_run=dry_run)
        else:
            _convert(Path(run), to or _beside(Path(run)), forms, check=check, console=console)
        return
    with open_run(run, home=default_home()) as opened:
        require_job(opened.layout)
        job = Job.load(opened.layout.job)
        merged = merged or (bool(forms) and job.method.kind != "full")
        if pushing:
            refuse_local_base(job.model.path, is_adapter=job.method.kind != "full" and not merged)
        console.progress("verifying the checkpoint")
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports, step=step)
        if dry_run:
            console.clear()
            _say(saved, opened, pushing, to=to, merged=merged)
            return
        if pushing:
            pushing.look(job.model.path, opened.layout.run_id, merged=merged)
        folder = _export(saved, opened, to=to, merged=merged, again=pushing is not None)
    if forms:
        _convert(folder, _beside(folder), forms, check=check, console=console)
    if pushing:
        pushing.send(folder)


def _say(saved: SavedPart, opened: RunHandle, pushing: _Pushing | None, *, to: Path | None, merged: bool) -> None:
    """What an export would do: the exact command, or the files where it has written them."""
    folder = exported_folder(saved, opened.layout, to=to, merged=merged)
    if pushing is not None and _is_export_of(folder, saved, opened, merged=merged):
        pushing.show(folder)
        return
    words = export_argv(saved, to=to, merged=merged)
    print_data([joined(saved.place.host.argv("-m", "gangline.worker", *words))])
    if pushing is not None:
        pushing.console.report(f"then all files of {folder} would be sent to {pushing.name}, with a model card")
        pushing.console.report("their sizes are known once it is written: gangline export without --push writes it")


def _export(saved: SavedPart, opened: RunHandle, *, to: Path | None, merged: bool, again: bool) -> Path:
    """The folder with the model and its card. again: one that is there and of this checkpoint is used as it is."""
    console, run_id = Terminal(), opened.layout.run_id
    there = exported_folder(saved, opened.layout, to=to, merged=merged)
    if again and _is_export_of(there, saved, opened, merged=merged):
        console.report(f"{there} has step {saved.step} of {run_id}: it is sent as it is")
        if not (there / MODEL_CARD).exists():
            write_card(there, records_of_opened(opened))
        return there
    console.report(f"exporting step {saved.step} of {run_id}")
    record = export_model(saved, opened.layout, to=to, merged=merged, on_text=console.progress)
    folder = Path(record["folder"])
    write_card(folder, records_of_opened(opened))
    difference = record["max_logit_difference"]
    compared = (
        "every tensor is what was saved" if difference is None else f"logits differ by {difference:.2g} at the most"
    )
    console.report(f"{'read' if difference is None else 'loaded'} again: {compared}")
    print_data([record["folder"]])
    console.report(f"talk to it: gangline chat {quoted(record['folder'])}")
    return folder


def _is_export_of(folder: Path, saved: SavedPart, opened: RunHandle, *, merged: bool) -> bool:
    """Whether the folder is an export of this checkpoint in this form; it has its name only when it is whole."""
    if not (folder / EXPORT_NOTE).is_file():
        return False
    note = read_json(folder / EXPORT_NOTE)
    expected = {"run": opened.layout.run_id, "step": saved.step, "merged": merged}
    return all(note.get(name) == value for name, value in expected.items())


# llama.cpp.


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


# The hub.


def _pushing(
    name: str | None, *, private: bool, yes: bool, forms: tuple[str, ...], console: Terminal
) -> _Pushing | None:
    """The push that was asked for. Raises UsageError for one that cannot be, before anything else is done."""
    if name is None:
        if private or yes:
            raise UsageError("--private and --yes are for --push", seen="no --push", fix="add --push owner/name")
        return None
    if forms:
        raise UsageError(
            "--push and --gguf do not go together",
            seen="--push sends the folder for transformers and peft",
            fix="export twice; GGUF files: hf upload owner/name FOLDER-gguf",
        )
    refuse_push(name, os.environ)
    return _Pushing(name=name, private=private, yes=yes, console=console)


def _push_folder(folder: Path, pushing: _Pushing, *, dry_run: bool) -> None:
    """Send a folder that an earlier export wrote."""
    note, is_adapter = note_of(folder), is_adapter_folder(folder)
    base = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"] if is_adapter else note["base_model"]
    refuse_local_base(base, is_adapter=is_adapter)
    if dry_run:
        pushing.show(folder)
        return
    pushing.look(base, str(note["run"]), merged=bool(note.get("merged")))
    pushing.send(folder)


@dataclass(slots=True, kw_only=True)
class _Pushing:
    """A folder on its way to the hub: look first, then send."""

    name: str
    private: bool
    yes: bool
    console: Terminal
    license: str = ""

    def show(self, folder: Path) -> None:
        """What would be sent."""
        files = files_of(folder)
        print_data([f"{name}  {format_bytes(size)}" for name, size in files])
        whole = format_bytes(sum(size for _, size in files))
        self.console.report(f"{len(files)} files, {whole}, would be sent to {self.name}; nothing was sent")

    def look(self, base: str, run: str, *, merged: bool) -> None:
        """Ask the hub who we are and what is there. Raises UsageError for what must not be written over."""
        self.console.progress(f"asking the hub for {self.name}")
        seen = look_at_hub(self.name, base, home=default_home())
        self.console.clear()
        refuse_public(self.name, seen, private=self.private)
        self.license = seen["license"]
        if seen["gated"]:
            self.console.report(f"{base} is gated: who loads this model has to accept its terms, too")
        if others := others_in(seen, run, merged=merged):
            self._ask(seen, others)

    def _ask(self, seen: dict[str, Any], others: list[str]) -> None:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        if self.yes:
            return
        question = f"{self.name} has other files: {shown}. Write beside them, and over those of the same name? [y/N]"
        if (self.console.ask(question) or "").lower() not in {"y", "yes"}:
            raise UsageError(
                f"--push {self.name}: it holds other files",
                seen=f"of {'another export' if seen['run'] else 'another program'}: {shown}",
                fix="name another repository; or --yes writes beside them, and over those of the same name",
            )

    def send(self, folder: Path) -> None:
        """Send the files."""
        record = send_folder(
            folder,
            self.name,
            private=self.private,
            license_name=self.license,
            home=default_home(),
            on_text=self.console.progress,
        )
        self.console.clear()
        self.console.report(
            f"{len(record['files'])} files, {format_bytes(record['num_bytes'])}, as {record['commit'][:12]}"
        )
        print_data([record["url"]])

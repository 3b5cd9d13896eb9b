"""`gangline convert FILE... [KEY=VALUE...]`: a file of another tool becomes job.yaml or cluster.yaml, key by key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, between_words, print_data, print_json
from gangline.errors import UsageError

if TYPE_CHECKING:
    from gangline.convert.host_lists import MovedHosts


def command(  # noqa: PLR0913  (options of a command line)
    words: Annotated[
        list[str],
        argument("FILE", "the trainer's file first, then accelerate's or DeepSpeed's; KEY=VALUE sets a key of the job"),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="file to write; by default job.yaml or cluster.yaml", show_default=False),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs that the file ran on, over all machines", show_default=False)
    ] = None,
    templates: Annotated[
        Path | None, option("a chat template that the file names, or a folder of them", "PATH")
    ] = None,
    leave_out: Annotated[list[str] | None, option("give this key up although numbers change", "KEY")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the report and the file, write nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what became of every key of another tool's file, and write ours where nothing that changes numbers is lost.

    Reads Axolotl, LLaMA-Factory, TRL, transformers' Trainer, torchtune, accelerate, DeepSpeed; and hosts of accelerate,
    Ray, SkyPilot, Ansible, ssh_config. Exit code 2 if a key has no counterpart.
    """
    from gangline.convert.host_lists import move_hosts
    from gangline.convert.job_text import HEADER, counts_line, report_rows
    from gangline.convert.move import MoveQuestion, move_job, recognise, require_whole, write
    from gangline.report.text_table import table

    files = tuple(Path(word) for word in words if "=" not in word or Path(word).exists())
    overrides = tuple(word for word in words if "=" in word and not Path(word).exists())
    if not files:
        raise UsageError("no file to convert", fix="gangline convert axolotl.yaml, for example")
    console = Terminal()
    if recognise(files[0]).holds == "hosts":
        _hosts(move_hosts(files[0], output or Path("cluster.yaml")), force=force, dry_run=dry_run, as_json=as_json)
        return
    asked = MoveQuestion(
        files=files,
        overrides=overrides,
        output=output or Path("job.yaml"),
        world_size=world_size,
        templates=templates,
        leave_out=tuple(leave_out or ()),
    )
    moved = move_job(asked, console=console)
    if as_json:
        print_json(moved.to_json())
    else:
        print_data(between_words(table(HEADER, report_rows(moved.made))))
        print_data(["", moved.text.rstrip("\n")] if dry_run and not moved.made.refused else [])
    require_whole(moved, asked)
    if not dry_run:
        write(moved, asked, force=force)
        sys.stderr.write(f"{counts_line(moved.made)}\nwritten: {asked.output}\nNext: gangline plan {asked.output}\n")


def _hosts(moved: MovedHosts, *, force: bool, dry_run: bool, as_json: bool) -> None:
    from gangline.context import default_home
    from gangline.convert.host_lists import write_hosts
    from gangline.report.text_table import table

    if as_json:
        print_json(moved.to_json())
    else:
        rows = [(row.verdict, row.key, str(row.value or ""), row.reason) for row in moved.listed.rows]
        print_data(between_words(table(("verdict", "key", "value", "in the file, or why not"), rows)))
        print_data(["", moved.text.rstrip("\n")] if dry_run else [])
    if not dry_run:
        write_hosts(moved, home=default_home(), force=force)
        sys.stderr.write(f"written: {moved.output}, one rank on each host\n")
        sys.stderr.write(f"Next: gangline init --pin {moved.output}   # or, to find GPUs, too: {moved.init_words}\n")

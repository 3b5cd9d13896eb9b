"""`gangline VERB ...`: the table of verbs, and how errors become exit codes.

A verb's module is imported when the verb is typed, and typer with it: `gangline --help` needs neither.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gangline
from gangline.cli import signals
from gangline.errors import GanglineError, UsageError

VERBS: dict[str, tuple[str, str]] = {
    "init": ("gangline.cli.init", "write cluster.yaml from host names; shows host keys first"),
    "discover": ("gangline.cli.discover", "list hosts with sshd on this computer's networks"),
    "convert": ("gangline.cli.convert", "turn files of other trainers into ours, key by key"),
    "setup": ("gangline.cli.setup", "build the environment that trains on this computer"),
    "check": ("gangline.cli.check", "look for faults on every host: evidence, meaning, fix"),
    "prepare": ("gangline.cli.prepare", "change hosts so that they can train; shown first, can be undone"),
    "data": ("gangline.cli.data", "show samples as the model sees them: what is learned or cut"),
    "plan": ("gangline.cli.plan", "say whether a job fits, who does what, how long, and why"),
    "train": ("gangline.cli.train", "check, plan, start and follow; the run goes on when you leave"),
    "sweep": ("gangline.cli.sweep", "try many values of a job's keys, a run for each, and rank them"),
    "run": ("gangline.cli.run", "run your own script on every host"),
    "export-config": ("gangline.cli.export_config", "write files for torchrun, deepspeed, sbatch"),
    "bench": ("gangline.cli.bench", "measure the network, each rank's speed, or how a job scales"),
    "ps": ("gangline.cli.ps", "list the runs"),
    "attach": ("gangline.cli.attach", "follow a run from now on"),
    "logs": ("gangline.cli.logs", "print the logs of a run"),
    "explain": ("gangline.cli.explain", "say why a run failed and what to do; of any logs, too"),
    "top": ("gangline.cli.top", "show what every machine and every rank does now"),
    "profile": ("gangline.cli.profile", "record a few steps on all ranks, for Perfetto; where time goes"),
    "ui": ("gangline.cli.ui", "show all runs in the browser: curves, hosts, logs; stop, resume"),
    "summary": ("gangline.cli.summary", "write one page about a run, to send"),
    "diff": ("gangline.cli.diff", "compare two runs, and find where losses part"),
    "report-bug": ("gangline.cli.report_bug", "write one redacted archive of a run, to be sent with a report"),
    "save": ("gangline.cli.save", "have a run save now, and go on"),
    "stop": ("gangline.cli.stop", "save and end a run"),
    "resume": ("gangline.cli.resume", "continue a run from its newest valid checkpoint"),
    "chat": ("gangline.cli.chat", "talk to the model of a run or of a folder"),
    "serve": ("gangline.cli.serve", "answer OpenAI's clients with a trained model, on 127.0.0.1"),
    "evaluate": ("gangline.cli.evaluate", "score a trained model on tasks, beside the one before training"),
    "export": ("gangline.cli.export", "write the model of a run, for transformers, peft and the hub"),
    "merge": ("gangline.cli.merge", "make one adapter out of several over the same model"),
    "demo": ("gangline.cli.demo", "the whole story on this computer, in about two minutes"),
    "recipes": ("gangline.cli.recipes", "list job files for common models and machines, or copy one"),
    "plugins": ("gangline.cli.plugins", "list installed plug-ins, and name the broken ones"),
    "completion": ("gangline.cli.completion", "print the script that has bash, zsh or fish complete your words"),
    "schema": ("gangline.cli.schema", "print the JSON Schema of job.yaml or cluster.yaml, for editors"),
}
"""Verb -> the module that has it as `command`, and one line for the list of verbs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    before = os.umask(0o077)  # files are readable by their owner only
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        os.umask(before)


def _main(words: list[str]) -> int:
    debug = words[:1] == ["--debug"]
    words = words[1:] if debug else words
    terminals = signals.terminals()
    try:
        with signals.raising():
            return _dispatch(words)
    except GanglineError as error:
        _say_error(error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        signals.say_interrupted()
        return signals.exit_code_of(interrupt)
    except BrokenPipeError:
        # the reader of our output has closed the pipe; without this Python reports the error again at exit
        sys.stdout = None
        return 0
    except Exception as error:  # noqa: BLE001  (the last line of defence: a bug becomes a line, not a screenful)
        if signals.is_hangup(error, terminals):
            signals.redirect_to_null(terminals)  # what is still to be written is tried again at exit
            return signals.HUNG_UP
        return _report_bug(error, words, debug=debug)


def _report_bug(error: Exception, words: list[str], *, debug: bool) -> int:
    from gangline.runs.files import full_disk

    if (known := full_disk(error)) is not None:
        _say_error(known)
        return known.exit_code
    _say_bug(error, words, debug=debug)
    return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"--help", "-h", "help"}:
        sys.stdout.write(help_text())
        return 0
    if words[0] in {"--version", "-V"}:
        sys.stdout.write(f"gangline {gangline.__version__}\n")
        return 0
    if words[0] == "--complete":
        from gangline.cli.complete import candidates

        sys.stdout.write("".join(f"{line}\n" for line in candidates(words[1:])))
        return 0
    if words[0] not in VERBS:
        raise _unknown(words[0])
    verb, rest = words[0], words[1:]
    try:
        command_of(verb)(rest, prog_name=f"gangline {verb}")
    except SystemExit as end:  # typer ends so, also after its own usage errors
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def help_text() -> str:
    """What `gangline --help` prints."""
    width = max(map(len, VERBS))
    rows = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "Hitch the machines you have to one training run.",
            "",
            "usage: gangline VERB ...        gangline VERB --help        gangline --version",
            "",
            *rows,
            "",
            "Runs are named by id (calm-otter-7) or by the beginning of one.",
            "Ctrl-C never ends a run that has started.",
            "Exit codes: 0 ok, 1 failed, 2 usage or config, 3 check failed, 4 host",
            "unreachable, 5 run failed, 6 plan does not fit, 130 interrupted.",
            "gangline --debug VERB ... shows the traceback of a bug.",
            "",
        ]
    )


def command_of(verb: str) -> Any:
    """The typer application of one verb."""
    import typer

    from gangline.cli.usage import Verb

    application = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    command = importlib.import_module(VERBS[verb][0]).command
    application.command(cls=Verb, context_settings={"help_option_names": ["--help", "-h"]})(_interruptible(command))
    return application


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Without it, typer ends Ctrl-C with "Aborted." and exit code 1."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as interrupt:
            signals.say_interrupted()
            raise SystemExit(signals.exit_code_of(interrupt)) from None

    return run


def _unknown(word: str) -> UsageError:
    near = difflib.get_close_matches(word, VERBS, n=1)
    hint = f"did you mean gangline {near[0]}?" if near else "gangline --help lists the verbs"
    return UsageError(f"no such verb: {word!r}", seen=f"known: {', '.join(VERBS)}", fix=hint)


def _say_error(error: GanglineError) -> None:
    _say(f"error: {error}\n")


def _say(text: str) -> None:
    """An error may quote what a host or a data set said."""
    from gangline.report.text_table import clean, wrapped

    shown = clean(text, keep_newlines=True)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        shown = "\n".join(row for line in shown.split("\n") for row in wrapped(line, width))
    sys.stderr.write(shown)


def _say_bug(error: Exception, words: list[str], *, debug: bool) -> None:
    text = traceback.format_exc()
    if debug:
        _say(text)
        return
    _say_error(
        GanglineError(
            f"this is a bug in gangline: {type(error).__name__}: {error}",
            seen=f"the traceback is in {_keep(text)}",
            fix=f"report it, or look closer: gangline --debug {' '.join(words[:1])} ...",
        )
    )


def _keep(text: str) -> Path | str:
    from gangline.context import default_home

    path = default_home() / "last-traceback.txt"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"nothing: {path}: {error.strerror}"
    return path


if __name__ == "__main__":
    sys.exit(main())

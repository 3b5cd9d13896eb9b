"""The words of every verb as data (words.json), for completion and for the man page gangline.1.

python -m gangline.cli.manual writes both anew.
"""

from __future__ import annotations

import enum
import importlib
import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gangline
from gangline.cli.main import VERBS, command_of
from gangline.cli.usage import spelled

ROOT = Path(__file__).parents[3]
"""Of a clone."""

ENDS = (
    (0, "ok"),
    (1, "failed"),
    (2, "usage or configuration"),
    (3, "a check failed"),
    (4, "a host is not reached"),
    (5, "the run failed"),
    (6, "the plan does not fit"),
    (130, "interrupted"),
)
FILES = (
    ("cluster.yaml", "the machines; read from the current folder where no other file is named"),
    ("$GANGLINE_HOME", "runs and settings; by default ~/.local/state/gangline"),
)


def describe_verbs() -> dict[str, Any]:
    """Verb -> its summary, its text and its parameters, as typer knows them. Imports every verb."""
    import typer

    found: dict[str, Any] = {}
    for verb, (module, summary) in VERBS.items():
        function = importlib.import_module(module).command
        types = typing.get_type_hints(function)
        command: Any = typer.main.get_command(command_of(verb))
        found[verb] = {
            "summary": summary,
            "text": " ".join((function.__doc__ or "").split()),
            "parameters": [_parameter(each, types[each.name]) for each in command.params],
        }
    return found


def _parameter(parameter: Any, annotation: Any) -> dict[str, Any]:
    """Typer's own types differ from version to version, so the function's annotation says what a value is."""
    kinds = [kind for kind in _kinds(annotation) if kind is not type(None)]
    choices = [str(each.value) for kind in kinds if issubclass(kind, enum.Enum) for each in kind]
    return {
        "names": list(parameter.opts) if parameter.param_type_name == "option" else [],
        "metavar": parameter.metavar or "|".join(choices) or str(parameter.name).upper(),
        "value": bool not in kinds,
        "many": parameter.nargs == -1 or bool(getattr(parameter, "multiple", False)),
        "required": bool(parameter.required),
        "path": Path in kinds,
        "choices": choices,
        "help": parameter.help or "",
    }


def _kinds(annotation: Any) -> list[type]:
    """The types in an annotation: `list[str] | None` -> str, NoneType."""
    parts = typing.get_args(annotation)
    return [kind for part in parts for kind in _kinds(part)] if parts else [annotation]


def page(verbs: Mapping[str, Any]) -> str:
    """The man page, in roff."""
    lines = [
        f'.TH GANGLINE 1 "" "gangline {gangline.__version__}" "User Commands"',
        ".SH NAME",
        r"gangline \- hitch the machines you have to one LLM training run",
        ".SH SYNOPSIS",
        r".B gangline",
        r"[\fB\-\-debug\fR] \fIVERB\fR ...",
        ".SH DESCRIPTION",
        _roff(
            "gangline plans a training job, starts it over ssh, supervises it, restarts it after a failure, and "
            "exports the model. A run is named by its id, such as calm-otter-7, or by the beginning of one. Ctrl-C "
            "never ends a run that has started."
        ),
        ".SH VERBS",
    ]
    for verb, about in verbs.items():
        lines += [f".SS gangline {_roff(verb)} {_usage(about['parameters'])}".rstrip(), _roff(about["text"])]
        for each in about["parameters"]:
            lines += [".TP", _term(each), _roff(each["help"]) or _roff(each["metavar"])]
    lines += [".SH EXIT STATUS"]
    for code, meaning in ENDS:
        lines += [".TP", rf"\fB{code}\fR", _roff(meaning)]
    lines += [".SH FILES"]
    for path, meaning in FILES:
        lines += [".TP", rf"\fI{_roff(path)}\fR", _roff(meaning)]
    return "\n".join(lines) + "\n"


def _usage(parameters: list[dict[str, Any]]) -> str:
    arguments = [each for each in parameters if not each["names"]]
    words = [spelled(each["metavar"], many=each["many"], required=each["required"]) for each in arguments]
    options = ["[OPTIONS]"] if len(arguments) < len(parameters) else []
    return _roff(" ".join([*options, *words]))


def _term(each: Mapping[str, Any]) -> str:
    names = ", ".join(rf"\fB{_roff(name)}\fR" for name in each["names"])
    value = rf"\fI{_roff(each['metavar'])}\fR" if each["value"] else ""
    return " ".join(filter(None, [names, value]))


def _roff(text: str) -> str:
    """Text without anything that roff would take for a command."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", escaped)


def texts() -> dict[str, str]:
    """Path below the project -> what it holds, of every file that is made from the verbs."""
    verbs = describe_verbs()
    return {
        "src/gangline/cli/words.json": json.dumps(verbs, indent=1) + "\n",
        "docs/gangline.1": page(verbs),
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (ROOT / name).write_text(text, encoding="utf-8")

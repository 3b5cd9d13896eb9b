"""The words that may come next on a command line of gangline, for the scripts of `gangline completion`.

It imports no verb: words.json has their options, the schema the keys of a job, the catalogue GPUs, links and models.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

FILES = ":files"
"""A line that says: a file may stand here, too."""

Candidates = Iterator[tuple[str, str]]
"""Words, each with its meaning."""


def candidates(words: Sequence[str]) -> list[str]:
    """The lines for the shell. words: those after `gangline`; the last one is under the cursor and may be empty."""
    before, current = list(words[:-1]), words[-1] if words else ""
    if before[:1] == ["--debug"]:
        before = before[1:]
    verbs = _data("words.json")
    if not before:
        found: Candidates = iter([(verb, about["summary"]) for verb, about in verbs.items()])
    elif before[0] in verbs:
        found = _of_verb(verbs[before[0]]["parameters"], before, current)
    else:
        found = iter(())
    lines = [(word, meaning) for word, meaning in found if word.startswith(current) or word == FILES]
    return [word if word == FILES else f"{word}\t{_short(meaning)}".rstrip() for word, meaning in lines]


def _short(meaning: str) -> str:
    """The first sentence, on one line."""
    return re.split(r"(?<=[a-z`)])[.:;] ", " ".join(meaning.split()), maxsplit=1)[0][:100]


def _data(name: str, package: str = "gangline.cli") -> Any:
    return json.loads(importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def _of_verb(parameters: Sequence[Mapping[str, Any]], before: Sequence[str], current: str) -> Candidates:
    options = {name: each for each in parameters for name in each["names"]}
    arguments = [each for each in parameters if not each["names"]]
    position, waiting = 0, None
    for word in before[1:]:
        if waiting is not None:
            waiting = None
        elif word in options:
            waiting = options[word] if options[word]["value"] else None
        elif not word.startswith("-"):
            position += 1
    if waiting is not None:
        yield from _values(waiting, before, current)
    elif current.startswith("-"):
        for name, each in options.items():
            if each["many"] or name not in before:
                yield name, each["help"]
        yield "--help", "show the options"
    elif arguments and (position < len(arguments) or arguments[-1]["many"]):
        yield from _values(arguments[min(position, len(arguments) - 1)], before, current)


def _values(parameter: Mapping[str, Any], before: Sequence[str], current: str) -> Candidates:
    """What may be the value of a parameter, by its metavar."""
    if parameter["choices"]:
        yield from ((choice, "") for choice in parameter["choices"])
        return
    kinds = parameter["metavar"].strip("[]").split("|")
    for kind in kinds:
        if kind in SOURCES:
            yield from SOURCES[kind](before, current)
    if parameter["path"] or {"FOLDER", "WHAT", "MODEL", "DIR", "FILE"} & set(kinds):
        yield FILES, ""


def _runs(_before: Sequence[str], _current: str) -> Candidates:
    """The newest first, with name and phase as they were written last: no host is asked."""
    from gangline.context import default_home
    from gangline.runs.layout import RunLayout
    from gangline.runs.registry import run_ids

    home = default_home()
    rows = []
    for run_id in run_ids(home):
        path = RunLayout(home, run_id).state
        try:
            state = json.loads(path.read_bytes())
            rows.append((str(state.get("created", "")), run_id, f"{state.get('name', '')} {state.get('phase', '')}"))
        except (OSError, ValueError, AttributeError):
            rows.append(("", run_id, ""))
    yield from ((run_id, meaning) for _, run_id, meaning in sorted(rows, reverse=True))


def _hosts(before: Sequence[str], _current: str) -> Candidates:
    """Of the run that the line names."""
    from gangline.context import default_home
    from gangline.runs.layout import RunLayout

    for word in before[1:]:
        try:
            cluster = json.loads(RunLayout(default_home(), word).cluster.read_bytes())
            yield from ((str(host["name"]), "") for host in cluster["hosts"])
        except (OSError, ValueError, LookupError, TypeError):
            continue


def _gpus(_before: Sequence[str], current: str) -> Candidates:
    """After the last comma, the name of a host and the number of cards."""
    from gangline.catalog.gpu_specs import all_gpus

    head = current[: max(current.rfind(","), current.rfind("=")) + 1]
    for gpu in all_gpus():
        yield head + short_name(gpu.name), gpu.name


def short_name(gpu: str) -> str:
    """A GPU's name as one types it: "NVIDIA GeForce RTX 5070 Ti Laptop GPU" is rtx5070ti-laptop."""
    words = [word for word in gpu.lower().split() if word not in {"nvidia", "geforce", "generation", "gpu"}]
    return re.sub(r"(?<=\d)-ti\b", "ti", re.sub(r"^(rtx|gtx)-(?=\d)", r"\1", "-".join(words)))


_MORE_LINKS = ("edr", "8x400g", "wifi6", "wifi7", "thunderbolt4", "powerline")


def _links(_before: Sequence[str], _current: str) -> Candidates:
    yield from ((name, "") for name in ("1gbit", "2.5gbit", "10gbit", "25gbit", "100gbit", "hdr", "ndr", *_MORE_LINKS))


def _models(_before: Sequence[str], _current: str) -> Candidates:
    from gangline.catalog.models import known_models

    yield from ((name, "") for name in known_models())


def _what(before: Sequence[str], current: str) -> Candidates:
    """A run, or the id of a finding."""
    yield from _runs(before, current)
    if current.upper().startswith("E-"):
        from gangline.checks.judge import FAMILIES

        for family in FAMILIES.built_in.values():
            yield from ((rule.id, rule.title) for rule in family)


def _recipes(_before: Sequence[str], _current: str) -> Candidates:
    from gangline.recipes import find_recipe, recipe_names

    yield from ((name, find_recipe(name).title) for name in recipe_names())


def _keys(_before: Sequence[str], current: str) -> Candidates:
    """Keys of job.yaml: as far as the last dot; after `=` the values that the schema lists."""
    schema = _data("schemas/job.schema.json", "gangline.config")
    key, equals, _ = current.partition("=")
    parts = key.split(".")
    node = schema
    for part in parts if equals else parts[:-1]:
        node = _properties(schema, node).get(part, {})
    if equals:
        yield from ((f"{key}={value}", "") for value in _constants(schema, node))
        return
    head = "".join(f"{part}." for part in parts[:-1])
    for name, child in _properties(schema, node).items():
        meaning = str(child.get("description", ""))
        if _properties(schema, child):
            yield f"{head}{name}.", meaning
        if _takes_value(schema, child):
            yield f"{head}{name}=", meaning


def _parts(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A node of the schema and all its alternatives."""
    if "$ref" in node:
        yield from _parts(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    elif "anyOf" in node:
        for each in node["anyOf"]:
            yield from _parts(schema, each)
    else:
        yield node


def _properties(schema: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in _parts(schema, node):
        found |= part.get("properties", {})
    return found


def _takes_value(schema: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    return any(part.get("type") not in {"object", "null"} for part in _parts(schema, node))


def _constants(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    for part in _parts(schema, node):
        yield from (str(value) for value in part.get("enum", ()))
        if "const" in part:
            yield str(part["const"])
        if part.get("type") == "boolean":
            yield from ("true", "false")


SOURCES: Mapping[str, Callable[[Sequence[str], str], Candidates]] = {
    "RUN": _runs,
    "HOST": _hosts,
    "MACHINES": _gpus,
    "GPU": _gpus,
    "LINK": _links,
    "MODEL": _models,
    "WHAT": _what,
    "KEY=VALUE": _keys,
    "RECIPE": _recipes,
}
"""Metavar -> the words that may stand for it."""

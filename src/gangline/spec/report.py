"""The words below `report`: every exporter of metrics by its name, checked by its own dataclass of options."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

from gangline.exporters import EXPORTERS, Exporter
from gangline.runs.job import ReportJob
from gangline.spec.fields import OrNone, Section, Shorthand
from gangline.spec.mistakes import listed, nearest, quote
from gangline.spec.validate import Checked
from gangline.spec.words import expected_words, fragment_at, seen_words


@functools.cache
def section_of(options: type) -> type[Section]:
    """The words for a dataclass of options: its fields, with `help` and `pattern` of their metadata."""
    hints = typing.get_type_hints(options)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(options):
        default = ... if each.default is dataclasses.MISSING else each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        words = Field(
            default,
            description=each.metadata.get("help"),
            pattern=each.metadata.get("pattern"),
            examples=each.metadata.get("examples"),
        )
        fields[each.name] = (hints[each.name], words)
    return create_model(options.__name__, __base__=Section, __doc__=options.__doc__, **fields)


def _words(exporter: Exporter) -> tuple[Any, Any]:
    """The type and the default of a built-in exporter's key: a switch, or its options and `none`."""
    fields = dataclasses.fields(exporter.options)
    if not fields:
        return bool, Field(exporter.default, description=exporter.help)
    section: Any = section_of(exporter.options)
    options = Annotated[section, Shorthand(fields[0].name)]
    examples = fields[0].metadata.get("examples")
    return Annotated[options | None, OrNone(), Field(examples=examples)], Field(None, description=exporter.help)


class _ReportWords(Section):
    """Where figures go besides the run's own metrics.jsonl. The exporter of a plug-in is a key here, too: `true`, or a
    mapping of its options.
    """

    model_config = ConfigDict(extra="allow")


if TYPE_CHECKING:
    ReportWords = _ReportWords
else:
    ReportWords = create_model(
        "ReportWords",
        __base__=_ReportWords,
        __doc__=_ReportWords.__doc__,
        **{name: _words(exporter) for name, exporter in EXPORTERS.built_in.items()},
    )


def resolve_report(checked: Checked[Any]) -> ReportJob:
    """The exporters of a job with their options. Mistakes in a plug-in's options are recorded; raises PluginError."""
    words: Section = checked.words.report
    found: dict[str, dict[str, Any]] = {}
    for name in EXPORTERS.built_in:
        value = getattr(words, name)
        if value not in (None, False):
            found[name] = {} if value is True else value.model_dump()
    for name, value in (words.model_extra or {}).items():
        if name not in EXPORTERS:
            _report_unknown(checked, name)
        elif value not in (None, False, "none"):
            found[name] = _options(checked, name, value)
    return ReportJob(exporters=found)


def _report_unknown(checked: Checked[Any], name: str) -> None:
    near = nearest(name, EXPORTERS)
    fix = f"did you mean {quote(near)}?" if near else "delete it, or install the package that brings it"
    expected = f"one of {listed(list(EXPORTERS))}"
    checked.report(("report", name), seen="there is no such exporter", expected=expected, fix=fix)


def _options(checked: Checked[Any], name: str, value: Any) -> dict[str, Any]:
    options = EXPORTERS[name].options
    kind, names = section_of(options), [each.name for each in dataclasses.fields(options)]
    given = {} if value is True else value if isinstance(value, dict) else {(names or ["value"])[0]: value}
    try:
        return kind.model_validate(given).model_dump()
    except ValidationError as error:
        schema = kind.model_json_schema()
        for detail in error.errors(include_url=False):
            path, fragment = detail["loc"], fragment_at(schema, detail["loc"]) or {}
            seen, expected = seen_words(detail["input"]), expected_words(schema, fragment, value=detail["input"])
            fix = f"write a value of that kind; `gangline plugins` names the package that brings {name}"
            if detail["type"] == "missing":
                seen, fix = "this key is missing", f"add it: `{path[-1]}: ...` below {name}"
                expected = expected_words(schema, fragment)
            elif detail["type"] == "extra_forbidden":
                near = nearest(str(path[-1]), names)
                seen, expected = "there is no such key", f"an option of {name}: {listed(names) or 'it has none'}"
                fix = f"did you mean {quote(near)}?" if near else "delete it"
            checked.report(("report", name, *path), seen=seen, expected=expected, fix=fix)
        return {}

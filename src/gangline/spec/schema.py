"""JSON Schemas of `job.yaml` and `cluster.yaml` for editors. `python -m gangline.spec.reference` writes them."""

from __future__ import annotations

import json
from typing import Any

from gangline.spec.cluster_words import ClusterWords
from gangline.spec.fields import PLUGIN, Section
from gangline.spec.job_words import JobWords

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, shorthands included."""
    return _schema(JobWords, title="gangline job")


def cluster_schema() -> dict[str, Any]:
    """The JSON Schema of a cluster file, shorthands included."""
    return _schema(ClusterWords, title="gangline cluster")


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as it lies in `schemas/`."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema(kind: type[Section], *, title: str) -> dict[str, Any]:
    schema: dict[str, Any] = _without_titles(kind.model_json_schema())
    return {"$schema": DIALECT, "title": title, **schema}


def _without_titles(fragment: Any) -> Any:
    """Without pydantic's titles ("Learning Rate"), which repeat the keys, and without our own remarks.

    A name of a built-in row or of a plug-in may be any name: the schema is the same on every computer.
    """
    if isinstance(fragment, list):
        return [_without_titles(entry) for entry in fragment]
    if not isinstance(fragment, dict):
        return fragment
    if isinstance(fragment.get("x-built-in"), list):
        rest = {key: value for key, value in fragment.items() if key not in {"type", "enum", "x-built-in"}}
        kinds = [{"type": "string", "enum": fragment["x-built-in"]}, {"type": "string", "pattern": PLUGIN}]
        return {"anyOf": kinds, **_without_titles(rest)}
    return {
        key: {name: _without_titles(inner) for name, inner in value.items()}
        if key in {"properties", "$defs"}
        else _without_titles(value)
        for key, value in fragment.items()
        if not (key in {"title", "x-fix"} and isinstance(value, str))
    }

"""The tables of `docs/job.md` and `docs/cluster.md` and the JSON Schemas, written from the models of the files.

`python -m gangline.config.reference <root of the repository>` writes them; a test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gangline.config.cluster_model import ClusterWords
from gangline.config.fields import PLUGIN, Section
from gangline.config.job_model import JobWords
from gangline.config.validate import Schema, expected_words, section, yaml_words
from gangline.runs.files import write_atomic

# JSON Schemas of `job.yaml` and `cluster.yaml` for editors. `python -m gangline.config.reference` writes them.


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


KEYS = "\n## Keys of the file\n"
"""The heading where the tables begin; the text before it is written by hand, on the page."""


def written_files(root: Path) -> dict[str, str]:
    """Every file that is written from the keys: path below the root of the repository -> content."""
    files = {}
    for kind, schema in (("job", job_schema()), ("cluster", cluster_schema())):
        page = f"docs/{kind}.md"
        files[page] = (root / page).read_text(encoding="utf-8").partition(KEYS)[0] + _tables(schema)
        files[f"src/gangline/config/schemas/{kind}.schema.json"] = schema_text(schema)
    return files


def _tables(schema: Schema) -> str:
    """One table for each mapping, in the order in which they are met; the second of a kind is left out."""
    pages = [_table(schema, schema, title="Keys of the file")]
    shown: list[Schema] = []
    queue: list[tuple[tuple[str, ...], Schema]] = [((name,), inner) for name, inner in schema["properties"].items()]
    while queue:
        path, fragment = queue.pop(0)
        inside = section(schema, fragment) or _items_section(schema, fragment)
        if inside is not None and not any(inside is other for other in shown):
            shown.append(inside)
            pages.append(_table(schema, inside, title=f"`{'.'.join(path)}`"))
            queue = [((*path, name), inner) for name, inner in inside["properties"].items()] + queue
    return "".join(pages)


def _items_section(schema: Schema, fragment: Schema) -> Schema | None:
    items = fragment.get("items")
    return section(schema, items) if isinstance(items, dict) else None


def _table(schema: Schema, inside: Schema, *, title: str) -> str:
    rows = [_row(schema, name, fragment, inside) for name, fragment in inside["properties"].items()]
    lead = _line(inside.get("description", ""))
    head = "| key | value | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {title}\n\n{lead}\n\n{head}" + "".join(rows)


def _row(schema: Schema, name: str, fragment: Schema, inside: Schema) -> str:
    kind = expected_words(schema, fragment).partition(" with the keys")[0]
    below = section(schema, fragment) or {}
    meaning = _line(fragment.get("description") or below.get("description", ""))
    cells = [f"`{name}`", kind, _default(name, fragment, inside), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(name: str, fragment: Schema, inside: Schema) -> str:
    if name in inside.get("required", ()):
        return "**required**"
    value: Any = fragment.get("default")
    return "" if value is None or isinstance(value, dict) else f"`{yaml_words(value)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def main(root: Path) -> None:
    """Write the pages and the schemas below the root of the repository."""
    for name, content in written_files(root).items():
        write_atomic(root / name, content.encode(), mode=0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

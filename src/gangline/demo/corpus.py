"""Text that every Python has: the documentation strings of its standard library."""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SHORTEST = 60
# Tests and generated tables have no prose.
_PASSED_OVER = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One documented name."""

    name: str
    """Such as textwrap.wrap."""
    text: str


def standard_library(*, limit_bytes: int) -> list[Entry]:
    """Documentation strings of public modules, classes and functions, until there are `limit_bytes` of text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    entries, size = [], 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _PASSED_OVER.isdisjoint(parts) and not any(part.startswith("_") for part in parts):
            for entry in _documented(path, ".".join(parts)):
                entries.append(entry)
                size += len(entry.text)
        if size >= limit_bytes:
            break
    return entries


def _documented(path: Path, module: str) -> Iterator[Entry]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    yield from _entries(tree, module)


def _entries(node: ast.AST, name: str) -> Iterator[Entry]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        if len(text) >= _SHORTEST:
            yield Entry(name=name, text=text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            yield from _entries(child, f"{name}.{child.name}")


def first_sentence(text: str) -> str:
    """The first paragraph on one line, up to its first full stop."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return paragraph.split(". ", 1)[0].rstrip(".") + "."


def write_corpus(folder: Path, entries: Iterable[Entry], *, every: int = 12) -> None:
    """Write pages.jsonl, held_out.jsonl (every twelfth page) and questions.jsonl (prompt, completion)."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(entries)
    pages = [{"text": f"{entry.name}\n\n{entry.text}"} for entry in entries]
    _write_lines(folder / "pages.jsonl", (page for index, page in enumerate(pages) if index % every))
    _write_lines(folder / "held_out.jsonl", pages[::every])
    questions = (
        {"prompt": f"What does {entry.name} do?\n", "completion": first_sentence(entry.text)}
        for entry in entries
        if len(first_sentence(entry.text)) < 200
    )
    _write_lines(folder / "questions.jsonl", questions)


def _write_lines(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)

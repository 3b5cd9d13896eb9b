"""Count the source: `python -m benchmarks.house [PATH]`, with src/gangline by default.

Prints one row per figure, so that two trees compare line by line:

    git archive 46ca701 src | tar -x -C /somewhere
    python -m benchmarks.house /somewhere/src/gangline

A code line is a line with a token of code on it: no blank line, no comment, no docstring. A function's length goes
from its `def` to its last line. A homonym is a public name that stands for two things: a public class that is defined
in two modules, a module whose file name occurs in two folders (`__init__` and `__main__` aside).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "gangline"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(slots=True, kw_only=True)
class House:
    """The figures of one source tree."""

    file_lengths: list[int] = field(default_factory=list)
    function_lengths: list[int] = field(default_factory=list)
    code_lines: int = 0
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Public class name -> files that define it."""
    modules: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Module name -> files of that name."""

    def rows(self) -> list[tuple[str, str]]:
        """(figure, its value), in the order of the page."""
        return [
            ("files", f"{len(self.file_lengths):,}"),
            ("lines", f"{sum(self.file_lengths):,}"),
            ("code lines", f"{self.code_lines:,}"),
            ("functions", f"{len(self.function_lengths):,}"),
            ("function length p50/p95/max", spread(self.function_lengths)),
            ("file length p50/p95/max", spread(self.file_lengths)),
            ("class homonyms", str(len(homonyms(self.classes)))),
            ("module homonyms", str(len(homonyms(self.modules)))),
        ]


def homonyms(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """The names that occur in more than one place, each with its places."""
    return {name: places for name, places in sorted(names.items()) if len(places) > 1}


def spread(lengths: list[int]) -> str:
    """Median, 95th percentile and maximum."""
    ordered = sorted(lengths)
    return "/".join(str(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.95, 1.0))


def count(source: Path) -> House:
    """Read every Python file below a folder."""
    house = named(source)
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        house.file_lengths.append(len(text.splitlines()))
        house.code_lines += len(code_lines(text) - docstring_lines(tree))
        house.function_lengths += [
            (node.end_lineno or node.lineno) - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
        ]
    return house


def named(source: Path) -> House:
    """Of every Python file below a folder the public names alone, which takes a fraction of the time."""
    house = House()
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                house.classes[node.name].append(name)
        if not path.stem.startswith("__"):
            house.modules[path.stem].append(name)
    return house


def code_lines(text: str) -> set[int]:
    """The numbers of the lines with a token of code on them, docstrings included."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of every string that stands by itself: docstrings of modules, classes, functions and attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def main(argv: list[str]) -> int:
    """Print the figures of a tree, and its homonyms on stderr."""
    source = Path(argv[0]) if argv else SOURCE
    if not source.is_dir():
        sys.stderr.write(f"{source} is no folder; give the folder of a package, such as src/gangline\n")
        return 2
    house = count(source)
    for figure, value in house.rows():
        sys.stdout.write(f"{figure:<28} {value}\n")
    for kind, names in (("class", house.classes), ("module", house.modules)):
        for name, places in homonyms(names).items():
            sys.stderr.write(f"{kind} {name}: {', '.join(places)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

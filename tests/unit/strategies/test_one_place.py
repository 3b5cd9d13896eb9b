"""Nobody but a strategy's own folder knows its kind: no comparison, no table by kind."""

import ast

import pytest

from gangline.strategies.table import STRATEGIES
from tests.source_trees import SOURCE, source_trees

KINDS = frozenset(STRATEGIES.built_in) | {"zero", "zero-"}
ALLOWED = {
    "config/strategy_rules.py": "keys of DeepSpeed's own configuration file",
    "launch/launchers/accelerate_options.py": "words of accelerate's command line and configuration file",
}


def decided_by_kind(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, kind) wherever a literal kind is compared, matched, looked for, or the key of a mapping."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            asked = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.match_case):
            asked = [node.pattern]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if node.func.attr in {"startswith", "removeprefix", "get"} else []
        found += [
            (each.lineno, str(each.value))
            for part in asked
            for each in ast.walk(part)
            if isinstance(each, ast.Constant) and each.value in KINDS
        ]
    return found


@pytest.mark.parametrize(
    "source",
    ['kind == "ddp"', 'kind in ("fsdp", "x")', '{"tp": 1}', 'match kind:\n case "pipeline": ...', 'a.get("hsdp")'],
)
def test_it_is_found(source):
    assert decided_by_kind(ast.parse(source))


def test_nobody_decides_by_kind():
    found = {}
    for path, tree in source_trees():
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("strategies/") and name not in ALLOWED:
            places = decided_by_kind(tree)
            found |= {name: places} if places else {}
    assert found == {}

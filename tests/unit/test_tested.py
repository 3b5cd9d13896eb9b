"""The table of tested versions is the one that pip, the tests and `gangline check` go by."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from gangline.tested import BY_NAME, TESTED
from tests.source_trees import source_trees

toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[2]
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
EXTRAS_AT_RUN_TIME = (EXTRAS[name] for name in ("train", "deepspeed", "optuna", "top", "serve", "evaluate"))
AT_RUN_TIME = [*PROJECT["project"]["dependencies"], *(row for rows in EXTRAS_AT_RUN_TIME for row in rows)]
TOOLS = [*PROJECT["build-system"]["requires"], *EXTRAS["dev"], *EXTRAS["wandb"], *EXTRAS["ui"], *EXTRAS["browser"]]
TOOLS += [*EXTRAS["kernels"], *EXTRAS["mlflow"], *EXTRAS["trackio"]]
IMPORTED_AS = {"ruamel.yaml": "ruamel"}
NEVER_IMPORTED = {
    "tensorboard": "torch.utils.tensorboard imports it",
    "pip": "a program: it gathers wheels",
    "uv": "a program: hosts get it",
}


def imported() -> set[str]:
    found = set()
    for _, tree in source_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


def pins() -> dict[str, str]:
    rows = re.findall(
        r"^([\w.-]+)==(\S+)(?: ; (python_version >= .*))?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    return {name: version for name, version, _ in rows}


def test_pip_accepts_what_the_table_says():
    assert sorted(AT_RUN_TIME) == sorted(each.requirement for each in TESTED)


def test_every_tool_has_both_bounds():
    assert [row for row in TOOLS if not re.fullmatch(r"[\w.-]+>=[\d.]+,<[\d.]+", row)] == []


def test_the_tests_run_with_the_newest_of_the_table():
    assert {each.package: pins()[each.package] for each in TESTED} == {each.package: each.newest for each in TESTED}


@pytest.mark.parametrize("each", TESTED, ids=lambda each: each.package)
def test_a_row_is_in_order(each):
    assert each.judge(each.lowest) is None
    assert each.judge(each.newest) is None
    assert each.judge(each.below) == "newer"
    assert each.reason


def test_a_dependency_that_nobody_imports_leaves():
    names = {IMPORTED_AS.get(name, name) for name in BY_NAME if name not in NEVER_IMPORTED}
    assert names - imported() == set()


@pytest.mark.parametrize(
    ("version", "word"),
    [
        ("5.2.9", "older"),
        ("5.3", None),
        ("5.3.0", None),
        ("5.17.0", None),
        ("5.23.4", None),
        ("5.24.0", "newer"),
        ("5.24.0.dev0", "newer"),
        ("6", "newer"),
        ("unknown", None),
    ],
)
def test_a_version_is_judged_by_its_numbers(version, word):
    assert BY_NAME["transformers"].judge(version) == word


def test_the_build_of_a_version_does_not_matter():
    assert BY_NAME["torch"].judge("2.13.0+cu128") is None

"""The rules of the house that no off-the-shelf tool checks: sizes, words, docstrings, places."""

import ast
import functools
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from benchmarks.house import count, homonyms, named
from tests.source_trees import SOURCE, source_trees

ROOT = Path(__file__).parents[2]
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTION_KINDS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Words that weaken somebody's machine. Written in two halves, so that this file does not contain them.
BANNED_TEXT = [
    "StrictHostKeyChecking" + r"[ =](no\b|off\b)",
    "UserKnownHostsFile" + r"[ =]/dev/null",
    "ufw " + "disable",
    "no_root" + "_squash",
    r"0\.0\." + r"0\.0",
    "weights_only" + r" ?= ?False",
    r"curl\b.*\| *" + r"(ba)?sh\b",
    "chmod " + r"(-R )?0?777",
]
# (file, banned text, why it has to be there)
TEXT_ALLOWED: list[tuple[str, str, str]] = []

BANNED_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "pickle.load", "pickle.loads"}
# (file, import or call, why it has to be there)
CODE_ALLOWED: list[tuple[str, str, str]] = [
    ("src/gangline/transport/bootstrap.py", "marshal", "writes the byte code of the agent, and reads none"),
    ("src/gangline/worker/model.py", "pickle", "names the error of a weights-only load that was refused"),
    ("src/gangline/worker/restore.py", "pickle", "an Unpickler that knows DCP's own records and refuses the rest"),
]

MACHINE_PATHS = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "/tmp/" + "env"]))
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}

# Public names that stand for two things in src, each with its reason. At most ten; take one out when it is gone.
HOMONYMS: dict[str, str] = {
    "plan": "every strategy's pure half, the document of a run that they fill, and the verb",
    "train": "every strategy's torch half, the entry of a rank that runs them, and the verb",
    "export": "the verb, and the code beside the model that it starts on a host",
    "prepare": "the verb that changes hosts, and what makes training samples of rows",
    "plugins": "the verb that lists plug-ins, and the tables that they add rows to",
    "reference": "the writers of docs/job.md and docs/cluster.md, of docs/strategies.md, and of docs/errors.md",
}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTION_KINDS)]


def num_lines(node) -> int:
    return node.end_lineno - node.lineno + 1


def tracked_files() -> list[Path]:
    """What git knows or would add; outside a clone, the folders of the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listing.returncode:
        pytest.skip("not a git clone")
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@functools.cache
def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked_files():
        try:
            found.append((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def test_no_function_is_longer_than_66_lines():
    long = [
        f"{path}:{node.lineno} {node.name}: {num_lines(node)}"
        for path, tree in source_trees()
        for node in functions(tree)
        if num_lines(node) > 66
    ]
    assert long == []


def test_95_percent_of_the_functions_have_fewer_than_40_lines():
    lengths = [num_lines(node) for _, tree in source_trees() for node in functions(tree)]
    assert statistics.quantiles(lengths, n=20)[-1] < 40


def test_no_file_is_longer_than_1000_lines():
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > 1000} == {}


def is_allowed(name: str, words: str, allowed: list[tuple[str, str, str]]) -> bool:
    return any(name == file and words == what for file, what, _ in allowed)


def is_quoted(name: str, line: str) -> bool:
    """An excerpt of somebody's log, or advice that a known failure warns of."""
    is_warning = name.startswith("src/gangline/diagnose/failures/") and line.startswith("avoid = ")
    return is_warning or name.startswith("tests/fixtures/failures/")


def test_nothing_that_weakens_a_machine_is_written_anywhere():
    found = [
        f"{name}:{number}: {match.group()}"
        for name, text in texts()
        for pattern in BANNED_TEXT
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(pattern, line)) and not is_allowed(name, match.group(), TEXT_ALLOWED)
        if not is_quoted(name, line)
    ]
    assert found == []


def dotted(node) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def dangers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in BANNED_IMPORTS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_IMPORTS:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call):
            if dotted(node.func) in BANNED_CALLS:
                yield node.lineno, dotted(node.func)
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if (keyword.arg, value) in {("shell", True), ("weights_only", False)}:
                    yield node.lineno, f"{keyword.arg}={value}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "os.system(text)",
        "run(text, shell=True)",
        "yaml.load(text)",
        "torch.load(path, weights_only=" + "False)",
    ],
)
def test_dangerous_code_is_recognised(code):
    assert list(dangers(ast.parse(code)))


def test_no_dangerous_code():
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {what}"
        for path, tree in source_trees()
        for line, what in dangers(tree)
        if not is_allowed(path.relative_to(ROOT).as_posix(), what, CODE_ALLOWED)
    ]
    assert found == []


def test_only_cli_and_report_print():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in source_trees()
        if path.relative_to(SOURCE).parts[0] not in {"cli", "report"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert found == []


def public_names(tree):
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTION_KINDS)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    item for item in node.body if isinstance(item, FUNCTION_KINDS) and not item.name.startswith("_")
                )


def test_every_module_and_every_public_name_has_a_docstring():
    silent = [str(path) for path, tree in source_trees() if not ast.get_docstring(tree)]
    silent += [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in source_trees()
        for node in public_names(tree)
        if not ast.get_docstring(node) and "overload" not in [dotted(item) for item in node.decorator_list]
    ]
    assert silent == []


def test_no_module_is_called_after_nothing():
    assert [str(path) for path in MODULES if VAGUE_NAMES & {path.stem, path.parent.name}] == []


def test_every_public_class_and_module_name_stands_for_one_thing():
    house = named(SOURCE)
    found = {**homonyms(house.classes), **homonyms(house.modules)}
    assert {name: places for name, places in found.items() if name not in HOMONYMS} == {}
    assert HOMONYMS.keys() - found.keys() == set(), "gone: take its row away"
    assert len(HOMONYMS) <= 10


def test_a_class_and_a_module_that_stand_for_two_things_are_noticed(tmp_path):
    for folder in ("checks", "planner"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "room.py").write_text("class Room:\n    pass\n")
        (tmp_path / folder / "__main__.py").write_text("class _Hidden:\n    pass\n")
    house = named(tmp_path)
    assert homonyms(house.classes) == {"Room": ["checks/room.py", "planner/room.py"]}
    assert homonyms(house.modules) == {"room": ["checks/room.py", "planner/room.py"]}


def test_lines_of_code_are_counted_without_blanks_comments_and_docstrings(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Its page,\n\non lines."""\n\n# why\nx = (\n    1\n)\n\n\ndef f():\n    """It."""\n    return x\n'
    )
    house = count(tmp_path)
    assert (house.code_lines, house.function_lengths, house.file_lengths) == (5, [3], [13])


def test_no_path_of_a_developers_machine():
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("tier", ["unit", "process"])
def test_tests_lie_where_the_source_lies(tier):
    tests = ROOT / "tests" / tier
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    homeless = [folder for folder in folders if not (SOURCE / folder).is_dir()]
    assert [str(folder) for folder in homeless if not (SOURCE / folder).with_suffix(".py").is_file()] == []

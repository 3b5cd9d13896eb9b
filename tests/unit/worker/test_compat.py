"""Private names of other libraries stand in one file, and their loss is told in three parts."""

import ast
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangline.errors import UsageError
from gangline.tested import BY_NAME
from gangline.worker import compat
from gangline.worker.compat import Private, overriding

SOURCE = Path(compat.__file__).parents[1]
ROOMS = ("worker", "strategies", "exporters.py", "formats.py")
FILES = sorted(
    path
    for room in ROOMS
    for path in ([SOURCE / room] if room.endswith(".py") else (SOURCE / room).rglob("*.py"))
    if path != Path(compat.__file__)
)
PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*")


def is_private(name):
    return PRIVATE.fullmatch(name) is not None


def own_names(tree):
    """What a file defines itself: functions, classes, variables, fields, and what it sets on `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gangline"):
            found |= {name.asname or name.name for name in node.names}
    return found


def of_others(tree):
    """Whose attributes are our own, or Python's: `from gangline.worker import loss as loss_module`, `import os`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gangline"):
            found |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Import):
            names = [name.asname or name.name for name in node.names]
            found |= {name for name in names if name.partition(".")[0] in sys.stdlib_module_names}
    return found


def foreign_private_names(source):
    """Line and text of every private name that the source does not define."""
    tree = ast.parse(source)
    own, ours = own_names(tree), of_others(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("gangline"):
            paths = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ours:
            paths = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            paths = [node.value]
        else:
            continue
        words = [word for path in paths for word in re.split(r"[.:]", path)]
        found += [f"{node.lineno}: {word}" for word in words if is_private(word) and word not in own]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._subclasses import fake_tensor",
        "from torch.distributed.tensor._utils import compute",
        "from transformers.utils import _LazyModule",
        "def f(x):\n    return x.model._tp_plan",
        "class A(B):\n    def f(self):\n        return self._inherited",
        "def f(x):\n    return getattr(x, '_hp_mapping', None)",
        "patch('bitsandbytes.functional._C.codes')",
        "import torch\ntorch._foreach_mul_(x, 2)",
    ],
)
def test_a_private_name_of_a_library_is_recognised(source):
    assert len(foreign_private_names(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import os\nos._exit(1)",
        "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self):\n        return self._own.__class__",
        "from gangline.worker import loss as loss_module\nloss_module._own(1)",
        "def _f():\n    pass\nx._f()",
    ],
)
def test_own_private_names_are_not_meant(source):
    assert foreign_private_names(source) == []


def test_no_other_file_takes_a_private_name_of_a_library():
    found = {str(path.relative_to(SOURCE)): foreign_private_names(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_row_is_used_and_belongs_to_a_library_of_the_tested_table():
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    names = {name: row for name, row in vars(compat).items() if isinstance(row, Private)}
    assert set(names.values()) == set(compat.ROWS)
    assert [name for name in names if f"compat.{name}." not in text and f"compat.{name}:" not in text] == []
    assert {row.library for row in compat.ROWS} <= set(BY_NAME)
    public = [row for row in compat.ROWS if not any(is_private(word) for word in re.split(r"[.:]", row.place))]
    replaced = [compat.STATIC_STORE, compat.DYNAMIC_STORE]  # names that a module has imported for its own use
    assert [row.place for row in public if row not in replaced] == ["deepspeed.ops:__compatible_ops__"]


GONE = Private(place="pytest:Mark._gone", purpose="a test", seen="8.3")


def test_a_name_that_is_gone_is_told_with_library_version_and_what_to_install(monkeypatch):
    monkeypatch.setitem(BY_NAME, "pytest", BY_NAME["torch"])
    for look in (GONE.get, lambda: GONE.of(object()), lambda: GONE.put(object(), 1)):
        with pytest.raises(UsageError) as told:
            look()
        assert told.value.what == (
            f"pytest {metadata.version('pytest')} has no pytest.Mark._gone, which gangline needs for a test"
        )
        assert told.value.seen == "it is a private name; gangline found it in pytest 8.3"
        tested = BY_NAME["torch"]
        assert f"pip install 'pytest>={tested.lowest},<={tested.newest}'" in told.value.fix


def test_a_library_that_is_not_there_is_told_the_same_way(monkeypatch):
    monkeypatch.setitem(BY_NAME, "no_such_library", BY_NAME["torch"])
    with pytest.raises(UsageError, match=r"no_such_library \(of an unknown version\) has no"):
        Private(place="no_such_library.inside:_name", purpose="a test", seen="1").get()


def test_a_name_that_is_there_is_found_by_its_place_and_on_its_owner():
    row = Private(place="json.encoder:JSONEncoder.item_separator", purpose="a test", seen="3.10")
    assert row.get() == ", "
    owner = SimpleNamespace(item_separator="; ")
    assert row.of(owner) == "; "
    row.put(owner, "|")
    assert row.of(owner) == "|"
    assert row.is_in(owner)
    assert not row.is_in(SimpleNamespace())


def test_what_was_replaced_comes_back_after_an_error():
    row = Private(place="a:B.word", purpose="a test", seen="1")
    owner = SimpleNamespace(word="own")

    def fail():
        with row.replaced(owner, "other"):
            raise ValueError(owner.word)

    with pytest.raises(ValueError, match="other"):
        fail()
    assert owner.word == "own"


def test_a_method_that_nobody_would_call_is_not_overridden(monkeypatch):
    class Base:
        def _made(self):
            return "base"

        def call(self):
            return self._made()

    made = Private(place="pytest:Base._made", purpose="a test", seen="1")
    assert overriding(Base, {made: lambda _self: "other"})().call() == "other"
    monkeypatch.setitem(BY_NAME, "pytest", BY_NAME["torch"])
    with pytest.raises(UsageError, match="_gone"):
        overriding(Base, {made: lambda _self: "other", GONE: lambda _self: None})

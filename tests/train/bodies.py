"""What ranks do in a test, named by pytest's process without importing it.

    from tests.train import cases_loop          # in a test: no torch comes with it
    pool(3).run(cases_loop.gradient, ...)       # a rank imports the module, and calls the function

Modules named cases_* import torch at their top, which costs pytest's processes seconds and memory that
only ranks need. `install` has such imports give a stand-in, with the functions and the plain values that the file defines: a test
says an ordinary name, which tools find and rename, and a name that is not there fails at once. Ranks and benchmarks
import the real modules.
"""

import ast
import contextlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMES = re.compile(r"tests\.train\.(data\.)?cases_\w+")


@dataclass(frozen=True)
class Body:
    """A function of a module that is not imported here."""

    module: str
    name: str


def address(function: Callable | Body) -> str:
    """Where a rank finds it: "package.module:function"."""
    if isinstance(function, Body):
        return f"{function.module}:{function.name}"
    return f"{function.__module__}:{function.__qualname__}"


class _Cases(types.ModuleType):
    def __getattr__(self, name):
        if name in self.__dict__.get("_functions", ()):
            return Body(self.__name__, name)
        raise AttributeError(f"{self.__name__} defines no function {name}, and nothing else that needs no import")


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not _NAMES.fullmatch(name):
            return None
        file = (ROOT / name.replace(".", "/")).with_suffix(".py")
        return importlib.util.spec_from_loader(name, _Loader(), origin=str(file)) if file.is_file() else None


class _Loader:
    @staticmethod
    def create_module(spec):
        return _Cases(spec.name)

    @staticmethod
    def exec_module(module):
        tree = ast.parse(Path(module.__spec__.origin).read_text(encoding="utf-8"))
        module.__dict__["_functions"] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with contextlib.suppress(ValueError):  # what has to be computed stays with the ranks
                    setattr(module, node.targets[0].id, ast.literal_eval(node.value))


def install():
    """For pytest's processes, before any test is imported."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)

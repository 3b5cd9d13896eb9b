"""The syntax trees of src, parsed once for all tests that look through them."""

import ast
import functools
import gc
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "gangline"


@functools.cache
def source_trees() -> list[tuple[Path, ast.Module]]:
    """(file, tree) of every module, in the order of their paths."""
    gc.disable()  # a tree has no garbage, and looking for it takes longer than parsing
    trees = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(SOURCE.rglob("*.py"))]
    gc.freeze()
    gc.enable()
    return trees

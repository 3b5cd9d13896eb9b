"""examples/notebook: every cell runs, in its order, as a kernel would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.train

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "first_run.ipynb"
KERNEL = """
import ast, json, sys
namespace = {}
for source in json.load(open(sys.argv[1]))["cells"]:
    if source["cell_type"] != "code":
        continue
    tree = ast.parse("".join(source["source"]))
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    value = eval(compile(last, "cell", "eval"), namespace) if last else None
    shown = [name for name in ("_repr_svg_", "_repr_html_") if hasattr(value, name)]
    print(json.dumps(getattr(value, shown[0])() if shown else repr(value)), flush=True)
"""


@pytest.mark.timeout(320)
def test_the_notebook_plans_trains_and_plots(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, NOTEBOOK],
        cwd=tmp_path,
        env={**os.environ, "GANGLINE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert shown[0].startswith("<pre>")
    assert "a step on two" in done.stdout
    assert shown[2].startswith("Run('")
    assert shown[3].startswith("('finished', ")
    assert shown[4].startswith("<svg")
    assert shown[4].count("<circle") == 3
    assert shown[5].endswith("trained')")
    assert (tmp_path / "trained" / "config.json").is_file()


def test_the_notebook_carries_no_output():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []

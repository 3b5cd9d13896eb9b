"""What a plan costs before it is computed."""

import subprocess
import sys


def test_planning_loads_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; import gangline.planner.decision, gangline.planner.decision, gangline.planner.report, "
        "gangline.decide.what_if, gangline.decide.what_if; "
        "print([name for name in ('torch', 'numpy', 'transformers', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

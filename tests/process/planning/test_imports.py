"""What a plan costs before it is computed."""

import subprocess
import sys


def test_planning_loads_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; import gangline.planning.decision, gangline.planning.instead, gangline.planning.report, "
        "gangline.steps.foretell, gangline.steps.told; "
        "print([name for name in ('torch', 'numpy', 'transformers', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""What happens in the process of test_publish: a tiny run is exported, for others to load."""

from pathlib import Path

from gangline.worker.export import export
from tests.train.cases_export import prepare


def adapter(folder, *, merged=False):
    """The folder of an export of a LoRA run."""
    _, _, run, part, _ = prepare(folder)
    return export(run, part, Path(folder) / "out", merged=merged).folder

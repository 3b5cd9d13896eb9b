"""`python -m gangline.batch_step RUN_FOLDER`: the batch step of a run on Slurm (gangline.control.slurm_job)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gangline.app import begin
from gangline.control.slurm_job import batch
from gangline.runs.layout import RunLayout

if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(batch(RunLayout.of(Path(sys.argv[1])), begin))

"""How long a run will be before its data is tokenised: a guess from the size of its files."""

from __future__ import annotations

from pathlib import Path

from gangline.runs.deal import total_steps
from gangline.runs.job import Job

BYTES_PER_TOKEN = 4.0
"""Of English text and today's vocabularies of 32,000 to 256,000 tokens; code and other languages have fewer."""


def estimated_steps(job: Job) -> tuple[int, str] | None:
    """Optimizer steps, and in words where the number is from; None where nothing can be said.

    Samples are taken to be full, as packing makes them; without it there are as many as rows, and rows are not counted.
    """
    if job.steps is not None:
        return job.steps, f"{job.steps} steps"
    if not job.data.packing or not job.data.train.files:
        return None
    try:
        num_bytes = sum(Path(file).stat().st_size for file in job.data.train.files)
    except OSError:
        return None
    tokens = num_bytes * (1 - job.data.evaluation_fraction) / BYTES_PER_TOKEN
    samples = max(1, round(tokens / job.data.sequence_length))
    steps = total_steps(samples, job.batch, epochs=job.epochs, steps=None)
    return steps, f"about {steps} steps = {job.epochs or 1:g} x {samples} samples, guessed from the size of the files"


def length_unknown(job: Job) -> str:
    """Why `estimated_steps` says nothing of a job, for people."""
    source = job.data.train
    gone = [Path(file).name for file in source.files if not Path(file).exists()]
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        return f"{gone[0]}{more} of data.train is not on this computer, so that nobody knows how many samples there are"
    if not source.files:
        return "data.train is on the hub, and how many samples it has is known once it is there"
    return "samples are not packed: there are as many as rows, and rows are counted when the data is prepared"

"""The table of kernels: its names are the words of job.yaml, and each has its module."""

from pathlib import Path
from typing import get_args

import gangline
from gangline.kernel_table import KERNELS, KernelWord


def test_the_words_of_job_yaml_are_the_rows():
    assert get_args(KernelWord) == ("auto", "torch", *KERNELS)


def test_each_row_has_a_module_of_its_own():
    places = [row.place for row in KERNELS.values()]
    assert len(set(places)) == len(places)
    source = Path(gangline.__file__).parents[1]
    assert all((source / (place.replace(".", "/") + ".py")).is_file() for place in places)

"""What is not there is None: a file, or a process that ends while its /proc is read."""

from __future__ import annotations

from pathlib import PurePath
from unittest import mock

import pytest

from gangline.launch.poll import process_runs
from gangline.transport.transport import Transport, read_if_there

STAT = PurePath("/proc/378/stat")
RECORD = {"pid": 378, "start_ticks": 5}


def failing(error: OSError) -> Transport:
    transport = mock.create_autospec(Transport, instance=True)
    transport.read.side_effect = error
    return transport


@pytest.mark.parametrize("error", [FileNotFoundError(2, "none"), ProcessLookupError(3, "No such process")])
def test_what_is_gone_is_none_and_its_process_does_not_run(error: OSError) -> None:
    assert read_if_there(failing(error), STAT) is None
    assert process_runs(failing(error), RECORD) is False


def test_what_may_not_be_read_is_an_error_but_of_a_process_it_says_that_the_number_is_anothers() -> None:
    with pytest.raises(PermissionError):
        read_if_there(failing(PermissionError(13, "no")), STAT)
    assert process_runs(failing(PermissionError(13, "no")), RECORD) is False

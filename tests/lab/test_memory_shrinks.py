"""Memory of a host shrinks in the middle of a run, by a foreign process in its control group: the run goes on."""

import pytest

from benchmarks import shrinking_memory

pytestmark = [pytest.mark.lab("cgroup"), pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_rank_whose_memory_shrinks_goes_on_smaller_and_a_resume_takes_what_is_free_again():
    (line,) = shrinking_memory.several("test", 1)
    assert line["what"] == f"rank {line['rank']} on {line['host']} ran out of memory and was killed by its kernel"
    assert line["attempts"] == 1
    before, after, rank = line["sizes_before"], line["sizes"], line["rank"]
    assert before == [8, 8, 8]
    assert after[rank] < 8
    assert [size for number, size in enumerate(after) if number != rank] == [8, 8]
    assert line["sizes_of_resume"] == [8, 8, 8]
    assert line["worst"] <= shrinking_memory.BAR

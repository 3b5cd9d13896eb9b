"""Partitions as sinfo shows them."""

import pytest

from gangline.errors import UsageError
from gangline.inventory.partitions import as_time, partition_named, read_partitions, seconds_of

SINFO = """gpu*|n1|64|515000|gpu:a100:4(S:0-1)|idle|2-00:00:00
gpu*|n2|64|515000|gpu:a100:4(S:0-1)|mixed|2-00:00:00
gpu*|n3|64|515000|gpu:a100:4(S:0-1)|down*|2-00:00:00
cpu|c1|128+|256000+|(null)|allocated|infinite
old|o1|16|64000|gpu:2,gpu:v100:1,fpga:1|drained|30:00
"""


@pytest.fixture
def partitions():
    return read_partitions(lambda *_words: SINFO)


def test_partitions_and_their_nodes(partitions):
    assert [(each.name, each.is_default, len(each.nodes)) for each in partitions] == [
        ("gpu", True, 3),
        ("cpu", False, 1),
        ("old", False, 1),
    ]
    gpu, cpu, old = partitions
    assert [(node.gpus, node.num_gpus, node.is_usable) for node in gpu.nodes] == [
        ((("a100", 4),), 4, True),
        ((("a100", 4),), 4, True),
        ((("a100", 4),), 4, False),
    ]
    assert (cpu.nodes[0].cpus, cpu.nodes[0].memory_mib, cpu.nodes[0].gpus) == (128, 256000, ())
    assert (old.nodes[0].gpus, old.nodes[0].is_usable) == ((("", 2), ("v100", 1)), False)
    assert gpu.lines() == ["3 nodes with 64 cores, 515 GB and 4 x a100, 1 idle"]


def test_the_default_or_the_one_that_is_named(partitions):
    assert partition_named(partitions, None).name == "gpu"
    assert partition_named(partitions, "cpu").name == "cpu"
    with pytest.raises(UsageError, match=r"no partition 'gpux'") as caught:
        partition_named(partitions, "gpux")
    assert "gpu, cpu" in caught.value.seen
    with pytest.raises(UsageError, match=r"no default partition"):
        partition_named(partitions[1:], None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("infinite", None),
        ("UNLIMITED", None),
        ("90", 5400),
        ("30:15", 1815),
        ("04:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:10", 172810),
    ],
)
def test_times_of_slurm(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "00:15:00"), (3600, "01:00:00"), (3601, "01:15:00"), (100_000, "1-04:00:00")]
)
def test_a_time_for_slurm_is_never_shorter(seconds, text):
    assert as_time(seconds) == text
    assert seconds_of(text) >= seconds

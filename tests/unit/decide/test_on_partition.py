"""The plan of a run that waits for Slurm."""

import dataclasses

import pytest

from gangline.decide import on_partition
from gangline.decide.on_partition import lines_on, machines_of, partition_of
from gangline.errors import UsageError
from gangline.inventory.partitions import PartitionNode, SlurmPartition
from gangline.planner.report import RunCost
from gangline.runs.cluster import SlurmComponent, SlurmRequest

NODES = tuple(
    PartitionNode(name=f"n{number}", cpus=64, memory_mib=515000, gpus=(("h100-sxm", 4),), state=state)
    for number, state in enumerate(("idle", "mixed", "down*"))
)
GPU = SlurmPartition(name="gpu", is_default=True, limit="1-00:00:00", nodes=NODES)
ASKED = SlurmRequest(nodes=2, gpus_per_node="4", time="04:00:00")


@pytest.fixture(autouse=True)
def _site(monkeypatch):
    monkeypatch.setattr(on_partition, "read_partitions", lambda: (GPU,))


def test_nodes_that_are_down_do_not_count():
    assert partition_of(ASKED) == GPU
    with pytest.raises(UsageError, match=r"too few nodes") as caught:
        partition_of(dataclasses.replace(ASKED, nodes=3))
    assert "expected 3 with 4 GPUs, found 2" in caught.value.seen


@pytest.mark.parametrize(
    ("asked", "machines"),
    [
        (ASKED, "node1=4xh100-sxm,node2=4xh100-sxm"),
        (SlurmRequest(nodes=1, gpus_per_node="a100-80gb:2"), "node1=2xa100-80gb"),
        (SlurmRequest(nodes=1, gpus_per_node="big:2", gpu="l40s"), "node1=2xl40s"),
    ],
)
def test_nodes_are_planned_as_machines(asked, machines):
    assert machines_of(asked, GPU) == machines


def test_nodes_of_two_kinds_are_planned_as_what_each_has(monkeypatch):
    node = PartitionNode(name="m0", cpus=64, memory_mib=515000, gpus=(("l40s", 2),), state="idle")
    small = SlurmPartition(name="small", is_default=False, limit="1:00:00", nodes=(node,))
    monkeypatch.setattr(on_partition, "read_partitions", lambda: (GPU, small))
    asked = SlurmRequest(
        nodes=1, gpus_per_node="4", components=(SlurmComponent(nodes=1, partition="small", gpus_per_node="2"),)
    )
    assert partition_of(asked) == GPU
    assert machines_of(asked, GPU) == "node1=4xh100-sxm,node2=2xl40s"
    more = dataclasses.replace(asked, components=(SlurmComponent(nodes=2, partition="small", gpus_per_node="2"),))
    with pytest.raises(UsageError, match=r"partition small has too few nodes"):
        partition_of(more)


@pytest.mark.parametrize("kind", ["mystery:2", "rtx6000:2"])
def test_a_type_that_is_no_card_is_asked_for(kind):
    with pytest.raises(UsageError, match=r"does not know which card") as caught:
        machines_of(SlurmRequest(nodes=1, gpus_per_node=kind), GPU)
    assert "slurm.gpu" in caught.value.fix


def test_processors_are_not_planned_unseen():
    with pytest.raises(UsageError, match=r"needs the nodes themselves"):
        machines_of(SlurmRequest(nodes=1), GPU)


@pytest.mark.parametrize(
    ("hours", "time", "said"),
    [
        (1.0, "01:30:00", "one of 1 h 30 min"),
        (1.0, "10:00:00", "`time: 01:15:00` would let Slurm start it sooner"),
        (10.0, "04:00:00", "4 of 4 h"),
        (10.0, "04:00:00", "`time: 12:30:00` would do it in one"),
        (100.0, "04:00:00", "32 of 4 h"),
        (1.0, "2-00:00:00", "more than partition gpu gives"),
        (1.0, "1", "leaves no time"),
    ],
)
def test_allocations_are_counted_and_a_limit_is_proposed(monkeypatch, hours, time, said):
    cost = RunCost(steps=100, words="", seconds=(hours * 3000, hours * 3600, hours * 4000), kwh=None)
    monkeypatch.setattr(on_partition, "run_cost", lambda _best, _length: cost)
    rows = lines_on(dataclasses.replace(ASKED, time=time), GPU, object(), object())
    assert rows[0] == ("partition", "gpu: 3 nodes with 64 cores, 515 GB and 4 x h100-sxm, 1 idle")
    assert said in rows[-1][1]

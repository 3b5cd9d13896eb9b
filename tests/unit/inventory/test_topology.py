"""The table of `nvidia-smi topo -m`. The tables here are written after its public format, not recorded."""

import pytest

from gangline.inventory.facts import parse_topology
from tests.unit.checks.machines import nvlink_table

TWO_PHB = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\t0-23\t0\t\tN/A
GPU1\tPHB\t X \t0-23\t0\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
OLD = """\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tmlx5_1\tCPU Affinity
GPU0\t X \tNV1\tNV2\tSYS\tPIX\tSYS\t0-19,40-59
GPU1\tNV1\t X \tSYS\tNV2\tPIX\tSYS\t0-19,40-59
GPU2\tNV2\tSYS\t X \tNV1\tSYS\tPIX\t20-39,60-79
GPU3\tSYS\tNV2\tNV1\t X \tSYS\tPIX\t20-39,60-79
mlx5_0\tPIX\tPIX\tSYS\tSYS\t X \tSYS\t
mlx5_1\tSYS\tSYS\tPIX\tPIX\tSYS\t X \t

Legend:

  X    = Self
"""
ONE = """\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \t\t\t\tN/A

Legend:
"""


def test_two_cards_behind_one_host_bridge():
    topology = parse_topology(TWO_PHB)
    assert topology is not None
    assert topology.gpus == ("GPU0", "GPU1")
    assert topology.joint("GPU0", "GPU1") == "PHB"


def test_eight_cards_on_a_switch_with_adapters_by_their_own_names():
    topology = parse_topology(nvlink_table())
    assert topology is not None
    assert len(topology.gpus) == 8
    assert topology.adapters == tuple(f"mlx5_{number}" for number in range(8))
    assert topology.joint("GPU0", "GPU7") == "NV18"
    assert topology.joint("GPU3", "mlx5_3") == "PXB"
    assert topology.joint("mlx5_0", "mlx5_7") == "SYS"
    assert topology.nearest("GPU3", topology.adapters) == "PXB"


def test_an_older_table_names_adapters_at_its_head():
    topology = parse_topology(OLD)
    assert topology is not None
    assert topology.gpus == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert topology.adapters == ("mlx5_0", "mlx5_1")
    assert topology.joint("GPU1", "GPU2") == "SYS"
    assert topology.nearest("GPU2", ("mlx5_0",)) == "SYS"


def test_one_card_has_nothing_to_be_joined_with():
    topology = parse_topology(ONE)
    assert topology is not None
    assert topology.gpus == ("GPU0",)
    assert topology.joints == ()


@pytest.mark.parametrize("text", ["", "No devices were found", "\tGPU0\tGPU1\nnonsense", "GPU0\nGPU0\tGPU0\n" * 3])
def test_what_is_no_table_is_no_topology(text):
    assert parse_topology(text) is None


def test_nvlink_is_nearer_than_any_bridge():
    topology = parse_topology(OLD)
    assert topology is not None
    assert topology.nearest("GPU0", ("GPU1", "mlx5_0", "GPU3")) == "NV1"

"""What collectives really send, counted on the interface, against what the plan says."""

import json
import subprocess
import sys

import pytest

from gangline.planner.traffic import collective_bytes
from tests.lab.hosts import ROOT, lab_folders

NUM_BYTES = 6 << 20


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [3, 4])
def test_bytes_are_those_that_gloo_moves(lab, size):
    hosts = lab(size, binds=lab_folders()).hosts
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", "-m", "tests.lab.cases_traffic", str(NUM_BYTES)]
    ranks = [
        host.popen(argv, env={**common, "RANK": str(rank)}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, host in enumerate(hosts)
    ]
    texts = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, texts
    said = [json.loads(out) for out, _ in texts]
    num_bytes = said[0]["num_bytes"]
    for operation in said[0]["sent"]:
        sent = [each["sent"][operation] for each in said]
        expected = collective_bytes(operation, num_bytes, size, backend="gloo")
        # the root of a broadcast, and a sender, send most; headers of 1500-byte packets are counted per 64 KiB only
        assert max(sent) == pytest.approx(expected, rel=0.02), operation
        if operation in {"all_reduce", "all_gather", "reduce_scatter"}:
            assert min(sent) == pytest.approx(expected, rel=0.02), operation

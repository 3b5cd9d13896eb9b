"""What was tried a moment ago counts for the next start, unless anything has changed since."""

import dataclasses
import datetime as dt
import os
import time

import pytest

from gangline.inventory.measured import RECENT_S, forget_pairs, keep_pairs, recent_pairs
from gangline.inventory.pairs import Pairs
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState
from tests.unit.checks.machines import inventory, pc

CLUSTER = Cluster(
    name="home",
    hosts=tuple(
        Host(name=name, workdir="/srv", python="python3", transport="ssh", address=f"10.0.0.{number}")
        for number, name in enumerate(("pc1", "pc2"), 1)
    ),
)


def tried(*, seconds_ago=5.0, mtu=1500):
    answers = {name: pc(name) for name in ("pc1", "pc2")}
    answers["pc2"]["nics"][0]["mtu"] = mtu
    when = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=seconds_ago)
    pairs = Pairs(measured=when.isoformat(timespec="seconds"), tier="quick")
    return dataclasses.replace(inventory(answers), pairs=pairs)


def ended(home, phase, *, seconds_ago):
    layout = RunLayout(home, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase=phase).save(layout)
    when = time.time() - seconds_ago
    os.utime(layout.state, (when, when))


def test_what_was_tried_a_moment_ago_counts(tmp_path):
    assert recent_pairs(tmp_path, CLUSTER, tried()) is None
    seen = tried()
    keep_pairs(tmp_path, CLUSTER, seen)
    assert recent_pairs(tmp_path, CLUSTER, tried()) == seen.pairs
    forget_pairs(tmp_path, CLUSTER)
    forget_pairs(tmp_path, CLUSTER)
    assert recent_pairs(tmp_path, CLUSTER, tried()) is None


def test_it_counts_for_the_next_job_of_slurm_on_the_same_nodes(tmp_path):
    def of_job(number):
        return dataclasses.replace(
            CLUSTER, hosts=tuple(dataclasses.replace(host, allocation=number) for host in CLUSTER.hosts)
        )

    keep_pairs(tmp_path, of_job("41"), tried())
    assert recent_pairs(tmp_path, of_job("42"), tried()) is not None
    assert recent_pairs(tmp_path, dataclasses.replace(of_job("42"), hosts=of_job("42").hosts[:1]), tried()) is None


@pytest.mark.parametrize("seconds_ago", [RECENT_S + 5, -100])
def test_not_for_long_and_not_from_the_future(tmp_path, seconds_ago):
    keep_pairs(tmp_path, CLUSTER, tried(seconds_ago=seconds_ago))
    assert recent_pairs(tmp_path, CLUSTER, tried()) is None


def test_not_for_another_network_or_another_cluster_file(tmp_path):
    keep_pairs(tmp_path, CLUSTER, tried())
    assert recent_pairs(tmp_path, CLUSTER, tried(mtu=9000)) is None
    assert recent_pairs(tmp_path, dataclasses.replace(CLUSTER, ports=(29500, 29500)), tried()) is None


@pytest.mark.parametrize(
    ("phase", "seconds_ago", "counts"),
    [("failed", 1, False), ("failed", 100, True), ("finished", 1, True)],
)
def test_not_if_a_run_has_failed_since(tmp_path, phase, seconds_ago, counts):
    keep_pairs(tmp_path, CLUSTER, tried(seconds_ago=50))
    ended(tmp_path, phase, seconds_ago=seconds_ago)
    assert (recent_pairs(tmp_path, CLUSTER, tried()) is not None) is counts


def test_a_damaged_file_is_no_help(tmp_path):
    keep_pairs(tmp_path, CLUSTER, tried())
    (tmp_path / "clusters" / "home" / "pairs.json").write_text("{")
    assert recent_pairs(tmp_path, CLUSTER, tried()) is None

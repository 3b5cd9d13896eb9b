"""`init --slurm`: a cluster file from what sinfo and sacctmgr say."""

import pytest

from gangline.errors import GanglineError, UsageError
from gangline.init.describe import InitQuestion
from gangline.init.describe_slurm import init_slurm

SINFO = """gpu|n1|64|515000|gpu:a100:4(S:0-1)|idle|2-00:00:00
gpu|n2|64|515000|gpu:a100:4(S:0-1)|mixed|2-00:00:00
short*|c1|128|256000|(null)|idle|00:30:00
"""


class Lines:
    """A console that keeps its lines."""

    def __init__(self):
        self.lines = []

    def report(self, line):
        self.lines.append(line)

    def progress(self, _line):
        """Not kept."""


def site(*words, accounts="chem\nphysics\n"):
    if words[0] == "sinfo":
        return SINFO
    if words[0] == "scontrol":
        return "ClusterName             = campus\n"
    if accounts is None:
        raise GanglineError("sacctmgr refused", seen="Slurm accounting storage is disabled")
    return accounts


def described(tmp_path, *, partition="gpu", read=site, **more):
    asked = InitQuestion(home=tmp_path, output=tmp_path / "cluster.yaml", **more)
    console = Lines()
    done = init_slurm(asked, partition=partition, shared=tmp_path / "home", console=console, read=read)
    return done, console.lines


def test_the_file_asks_for_what_the_partition_has_and_reads_back(tmp_path):
    done, lines = described(tmp_path)
    asked = done.cluster.slurm
    assert (asked.partition, asked.account, asked.gpus_per_node, asked.nodes) == ("gpu", "chem", "a100:4", 1)
    assert asked.time == "1-00:00:00"
    assert (done.cluster.name, done.cluster.shared) == ("campus", (str(tmp_path / "home"),))
    assert "also yours: physics" in done.text
    assert done.path.read_text() == done.text
    assert lines[0] == "* gpu: 2 nodes with 64 cores, 515 GB and 4 x a100, 1 idle; longest time 2-00:00:00"


def test_the_default_partition_and_its_shorter_limit_are_taken(tmp_path):
    done, _ = described(tmp_path, partition=None, read=lambda *words: site(*words, accounts=None), dry_run=True)
    asked = done.cluster.slurm
    assert (asked.partition, asked.account, asked.gpus_per_node, asked.time) == ("short", None, None, "00:30:00")
    assert done.path is None


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "cluster.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"is there already"):
        described(tmp_path)
    assert (tmp_path / "cluster.yaml").read_text() == "mine"


def test_of_several_partitions_without_a_default_none_is_guessed(tmp_path):
    with pytest.raises(UsageError, match=r"no default partition"):
        described(tmp_path, partition=None, read=lambda *words: site(*words).replace("*", ""))

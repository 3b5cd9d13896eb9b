"""The backend slurm: hosts from an allocation, and the one srun that starts their agents."""

import dataclasses

import pytest

from gangline.errors import UsageError
from gangline.launch import slurm
from gangline.launch.slurm import SlurmBackend, read_addresses, read_nodes
from gangline.runs.cluster import Cluster, Host, SlurmComponent, SlurmRequest
from gangline.runs.gang import Gang, GangRank
from gangline.transport import slurm_commands

JOB = """JobId=41 JobName=x
   NodeList=n[0-2]
   JOB_GRES=gpu:a100:5
     Nodes=n0 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:1(IDX:0)
     Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0,3),fpga:7
   MinMemoryNode=0
"""
NODES = """NodeName=n0 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=n0 OS=Linux 6.1
NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.2 NodeHostName=n1
NodeName=n2 NodeAddr=127.0.0.3
"""


@pytest.fixture
def site(monkeypatch):
    """A Slurm that knows job 41."""

    def answer(*words):
        if words[:3] == ("scontrol", "show", "hostnames"):
            return {"n[1-2]": "n1\nn2"}[words[3]]
        return NODES if "node" in words else JOB

    monkeypatch.setattr(slurm, "slurm", answer)
    monkeypatch.setattr(slurm_commands, "slurm", answer)


def cluster():
    asked = SlurmRequest(nodes=3, workdir="/scratch/ada/", python="/venv/bin/python", env={"A": "1"})
    return Cluster(name="campus", hosts=(), backend="slurm", slurm=asked)


def test_nodes_and_their_gpus_are_read_from_the_job():
    assert read_nodes(JOB) == [("n0", 1), ("n[1-2]", 2)]
    assert read_nodes("   Nodes=n0 CPU_IDs=0 Mem=0 GRES=\n") == [("n0", 0)]
    assert read_nodes("   Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:4(IDX:0-3)\n") == [("n0", 4)]
    assert read_nodes("   Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:0),gpu:h100:2(IDX:1-2)\n") == [("n0", 3)]


def test_addresses_are_read_from_the_nodes():
    assert read_addresses(NODES) == {"n0": "127.0.0.1", "n1": "127.0.0.2", "n2": "127.0.0.3"}
    assert read_addresses("NodeName=n9 Arch=x86_64\n") == {"n9": "n9"}


def test_the_hosts_are_the_nodes_of_the_allocation(site):
    hosts = SlurmBackend().hosts(cluster(), {"SLURM_JOB_ID": "41"}).hosts
    assert [(host.name, host.slots, host.workdir, host.allocation) for host in hosts] == [
        ("n0", 1, "/scratch/ada/n0", "41"),
        ("n1", 2, "/scratch/ada/n1", "41"),
        ("n2", 2, "/scratch/ada/n2", "41"),
    ]
    assert {(host.transport, host.python) for host in hosts} == {("srun", "/venv/bin/python")}
    assert hosts[1].address == "127.0.0.2"


def test_nodes_that_were_chosen_stay_and_those_of_an_earlier_allocation_do_not(site):
    every = SlurmBackend().hosts(cluster(), {"SLURM_JOB_ID": "41"})
    one = dataclasses.replace(every, hosts=every.hosts[1:2])
    assert SlurmBackend().hosts(one, {"SLURM_JOB_ID": "41"}) == one
    old = dataclasses.replace(one, hosts=(dataclasses.replace(one.hosts[0], allocation="40"),))
    assert [host.name for host in SlurmBackend().hosts(old, {"SLURM_JOB_ID": "41"}).hosts] == ["n0", "n1", "n2"]


TWO_KINDS = """JobId=41 HetJobId=41 HetJobOffset=0 JobName=x
   NodeList=n0
     Nodes=n0 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0-1)

JobId=42 HetJobId=41 HetJobOffset=1 JobName=x
   NodeList=n[1-2]
     Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=
"""


def test_nodes_of_two_kinds_are_reached_and_started_by_their_component(site, monkeypatch):
    monkeypatch.setattr(slurm, "slurm", lambda *words: NODES if "node" in words else TWO_KINDS)
    whole = cluster()
    asked = dataclasses.replace(whole.slurm, nodes=1, components=(SlurmComponent(nodes=2, slots=3),))
    nodes = SlurmBackend().hosts(dataclasses.replace(whole, slurm=asked), {"SLURM_JOB_ID": "41"})
    assert [(host.name, host.slots, host.allocation) for host in nodes.hosts] == [
        ("n0", 2, "41+0"),
        ("n1", 3, "41+1"),
        ("n2", 3, "41+1"),
    ]
    assert SlurmBackend().hosts(nodes, {"SLURM_JOB_ID": "41"}) == nodes
    assert slurm_commands.step_argv(nodes.hosts[2])[:4] == ["srun", "--jobid=41", "--het-group=1", "--nodelist=n2"]
    gang = Gang(
        run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=n, share=1, device=0) for n in ("n0", "n2"))
    )
    words = SlurmBackend(num_cpus=4).render(nodes, gang, port=29500).launcher.argv
    border = words.index(":")
    assert words[:4] == ("srun", "--jobid=41", "--het-group=0", "--nodelist=n0")
    assert words[border + 1 : border + 3] == ("--het-group=1", "--nodelist=n2")
    assert words[:border].count("n2") == words[border:].count("n2") == 1  # each agent looks up its own folder


def test_steps_of_a_job_with_a_number_of_gpus_in_all_say_how_many_they_take(site, monkeypatch):
    in_all = JOB + "   TresPerJob=gres:gpu:5\n"
    monkeypatch.setattr(slurm, "slurm", lambda *words: NODES if "node" in words else in_all)
    nodes = SlurmBackend().hosts(cluster(), {"SLURM_JOB_ID": "41"})
    assert [slurm_commands.step_argv(host)[-1] for host in nodes.hosts] == ["--gpus=1", "--gpus=2", "--gpus=2"]
    gang = Gang(
        run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=n, share=1, device=0) for n in ("n0", "n2"))
    )
    words = SlurmBackend(num_cpus=4).render(nodes, gang, port=29500).launcher.argv
    border = words.index(":")
    assert {"--nodelist=n0", "--gpus=1"} <= set(words[:border])
    assert {"--nodelist=n2", "--gpus=2"} <= set(words[border:])


def test_two_components_on_one_node_are_refused(site, monkeypatch):
    same = TWO_KINDS.replace("Nodes=n[1-2]", "Nodes=n0")
    monkeypatch.setattr(slurm, "slurm", lambda *words: NODES if "node" in words else same)
    with pytest.raises(UsageError, match=r"have the same node") as caught:
        SlurmBackend().hosts(cluster(), {"SLURM_JOB_ID": "41"})
    assert "--exclusive" in caught.value.fix


def test_outside_of_an_allocation_nothing_is_found():
    with pytest.raises(UsageError, match=r"inside an allocation of Slurm only"):
        SlurmBackend().hosts(cluster(), {})


def test_hosts_of_a_cluster_file_are_no_nodes():
    ssh = Cluster(name="lan", hosts=(Host(name="pc1", workdir="/w", python="p", transport="ssh"),), backend="slurm")
    with pytest.raises(UsageError, match=r"no nodes of Slurm"):
        SlurmBackend().hosts(ssh, {"SLURM_JOB_ID": "41"})


def test_one_srun_starts_the_agent_of_every_node_and_takes_no_leases(site):
    nodes = SlurmBackend().hosts(cluster(), {"SLURM_JOB_ID": "41"})
    ranks = tuple(GangRank(host=name, share=1, device=0) for name in ("n0", "n1", "n2"))
    gang = Gang(run_id="calm-otter-7", attempt=2, ranks=ranks)
    request = SlurmBackend(num_cpus=4).render(nodes, gang, port=29500)
    assert [part.leases for part in request.hosts] == [None] * 3
    assert request.launcher is not None
    words = request.launcher.argv
    assert {"--jobid=41", "--nodelist=n0,n1,n2", "--ntasks=3", "--no-kill", "--ntasks-per-node=1"} <= set(words)
    assert words[words.index("n1") + 1] == "/scratch/ada/n1/runs/calm-otter-7/attempts/2/n1"

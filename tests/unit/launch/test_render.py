"""Exactly what would be started, compared as a whole."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.errors import RunFailed, UsageError
from gangline.launch.backend import LaunchRequest, WarmPool
from gangline.launch.backends import backend
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank

GOLDEN = Path(__file__).parents[2] / "golden"

CLUSTER = Cluster(
    name="home",
    hosts=(
        Host(name="pc1", workdir="/srv/pc1", python="/opt/gangline/bin/python", slots=2),
        Host(
            name="pc2",
            workdir="/srv/pc2",
            python="/opt/gangline/bin/python",
            interface="enp5s0",
            env={"HF_HOME": "/srv/hub", "OMP_NUM_THREADS": "3"},
        ),
    ),
)
RANKS = (GangRank(host="pc1", share=3), GangRank(host="pc1", share=2), GangRank(host="pc2", share=1))
GANG = Gang(run_id="calm-otter-7", attempt=2, ranks=RANKS)


def rendered(cluster=CLUSTER, num_cpus=12):
    return DirectBackend(num_cpus=num_cpus).render(cluster, GANG, port=29511)


def test_the_whole_request():
    golden = GOLDEN / "direct_request.json"
    text = json.dumps(rendered().to_json(), indent=2, sort_keys=True) + "\n"
    assert text == golden.read_text(encoding="utf-8")


def test_the_store_of_one_computer_is_for_it_alone_and_that_of_several_is_torchs():
    ours = ("-m", "gangline.worker", "launch", "-m", "torch.distributed.run")
    assert rendered().hosts[0].argv[1:6] == ours
    alone = DirectBackend().render(CLUSTER, GANG, port=29511, program=replace(PREFORK, alone=True))
    assert alone.hosts[0].argv[1:7] == (*ours, "--standalone")
    command = DirectBackend().render(CLUSTER, GANG, port=29511, program=Program(kind="command", argv=("train.py",)))
    assert command.hosts[0].argv[1:3] == ("-m", "torch.distributed.run")  # their environment may not know gangline
    assert prefork_part(Program()).argv[1:3] == ("-m", "torch.distributed.run")


def test_launchers_of_two_runs_with_one_name_do_not_meet():
    def name(gang):
        argv = DirectBackend().render(CLUSTER, gang, port=29511).hosts[0].argv
        return argv[argv.index("--rdzv-id") + 1]

    assert name(GANG) == "calm-otter-7-2"
    mine, yours = name(replace(GANG, token="a" * 32)), name(replace(GANG, token="b" * 32))
    assert mine != yours
    assert "aaaa" not in mine
    assert name(replace(GANG, token="a" * 32, attempt=3)) != mine


def test_a_request_survives_its_file():
    request = rendered()
    assert LaunchRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(12, "4"), (2, "1"), (7, "2")])
def test_the_cores_of_one_machine_are_dealt_to_its_ranks(num_cpus, num_threads):
    assert rendered(num_cpus=num_cpus).hosts[0].env["OMP_NUM_THREADS"] == num_threads


def test_what_the_cluster_file_says_of_a_host_has_the_last_word():
    assert rendered().hosts[1].env["OMP_NUM_THREADS"] == "3"


def test_several_machines_meet_at_the_address_of_the_head():
    far = tuple(
        replace(host, transport="ssh", address=f"192.168.1.{number}") for number, host in enumerate(CLUSTER.hosts, 10)
    )
    first, second = rendered(replace(CLUSTER, hosts=far)).hosts
    for part, local in ((first, "192.168.1.10"), (second, "192.168.1.11")):
        assert part.argv[part.argv.index("--master-addr") + 1] == "192.168.1.10"
        assert part.argv[part.argv.index("--local-addr") + 1] == local
    assert "GLOO_SOCKET_IFNAME" not in first.env
    assert first.env["OMP_NUM_THREADS"] == "1"


def test_variables_that_name_networks_come_from_outside_and_an_interface_of_the_file_counts_more():
    networks = {"pc1": {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}, "pc2": {"NCCL_IB_HCA": "mlx5_0"}}
    first, second = DirectBackend(num_cpus=12).render(CLUSTER, GANG, port=29511, networks=networks).hosts
    assert (first.env["GLOO_SOCKET_IFNAME"], first.env["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert (second.env["GLOO_SOCKET_IFNAME"], second.env["NCCL_IB_HCA"]) == ("enp5s0", "mlx5_0")


def test_our_own_code_is_on_the_path_of_our_worker_and_not_of_the_users_program():
    cluster = replace(CLUSTER, hosts=tuple(replace(host, code="/srv/code/1f") for host in CLUSTER.hosts))
    program = Program(kind="command", argv=("train.py", "--lr", "1e-4"), env={"COLOUR": "green"})
    for request, path in (
        (rendered(cluster), "/srv/code/1f"),
        (DirectBackend(num_cpus=12).render(cluster, GANG, port=29511, program=program), None),
    ):
        assert request.hosts[0].env.get("PYTHONPATH") == path
    assert request.hosts[0].env["COLOUR"] == "green"


def test_the_words_in_front_of_python_stand_in_front_of_torchrun():
    host = replace(CLUSTER.hosts[0], prefix=("apptainer", "exec", "train.sif"))
    part = rendered(replace(CLUSTER, hosts=(host, CLUSTER.hosts[1]))).hosts[0]
    assert part.argv[:5] == ("apptainer", "exec", "train.sif", "/opt/gangline/bin/python", "-m")


def test_the_users_program_runs_in_its_folder_and_writes_the_log_of_its_rank():
    program = Program(kind="command", argv=("train.py", "--lr", "1e-4"), cwd="code/8a/project")
    part = DirectBackend(num_cpus=12).render(CLUSTER, GANG, port=29511, program=program).hosts[1]
    folder = "/srv/pc2/runs/calm-otter-7/attempts/2"
    assert part.cwd == "/srv/pc2/code/8a/project"
    python = "/opt/gangline/bin/python"
    words = ("--no-python", python, f"{folder}/pc2/rank_start.py", folder, python, "train.py", "--lr", "1e-4")
    assert part.argv[-8:] == words
    assert part.join_timeout_s is None


PREFORK = Program(rest_s=600.0)


def prefork_part(program):
    far = tuple(replace(host, transport="ssh", address=f"10.0.0.{n}") for n, host in enumerate(CLUSTER.hosts, 10))
    cluster = replace(CLUSTER, hosts=far)
    return DirectBackend(num_cpus=12).render(cluster, GANG, port=29511, program=program).hosts[0]


def test_prefork_processes_are_started_in_the_place_of_ranks():
    plain, part = prefork_part(Program()), prefork_part(PREFORK)
    root = "/srv/pc1/runs/calm-otter-7"
    words = ("train", f"{root}/job.json", f"{root}/attempts/2/gang.json", "/srv/pc1")
    assert plain.argv[-6:] == ("-m", "gangline.worker", *words)
    control = f"{root}/attempts/2/pc1/prefork"
    assert part.argv == (*plain.argv[:-4], "prefork", control, *words)
    assert part.warm_pool == WarmPool(rest_s=600.0, words=words, world_size=3)
    assert replace(part, argv=plain.argv, warm_pool=None) == plain
    assert LaunchRequest.from_json(
        json.loads(json.dumps(LaunchRequest(run_id="a", attempt=1, hosts=(part,)).to_json()))
    ).hosts == (part,)


def test_a_launcher_that_is_alone_knows_nothing_of_the_others():
    part = prefork_part(replace(PREFORK, alone=True))
    begin, end = part.argv.index("torch.distributed.run") + 1, part.argv.index("gangline.worker") - 1
    folder = "/srv/pc1/runs/calm-otter-7/attempts/2/pc1"
    assert part.argv[begin:end] == (
        "--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--local-addr", "127.0.0.1",
        "--max-restarts", "0", "--monitor-interval", "0.1", "--shutdown-timeout", "10", "--log-dir", f"{folder}/torchrun",
    )  # fmt: skip
    assert (part.alone, part.meet) == (True, ("10.0.0.10", 29511))  # there the ranks meet


def test_a_program_of_the_user_has_no_warm_pool_and_launchers_meet_where_nothing_does():
    program = Program(kind="command", argv=("train.py",), rest_s=600.0, alone=True)
    for part in (prefork_part(program), prefork_part(Program(alone=True))):
        assert (part.warm_pool, part.alone) == (None, False)
        assert "--master-addr" in part.argv


def test_a_request_with_other_ranks_than_planned_does_not_start():
    request = rendered()
    request.require_whole()
    for changed in (request.on(["pc1"]), replace(request, world_size=4)):
        with pytest.raises(RunFailed, match="its world size is not what the plan says"):
            changed.require_whole()


def test_backends_have_names():
    assert isinstance(backend("direct"), DirectBackend)
    with pytest.raises(UsageError, match="there is no launch backend 'slrm'"):
        backend("slrm")

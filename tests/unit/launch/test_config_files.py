"""Files for other launchers: the hosts, ranks, variables and the command of a request, and what they cannot say."""

import pytest

from gangline.control.user_command import command_gang
from gangline.errors import UsageError
from gangline.launch.config_files import FORMATS, RunForOthers
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.runs.cluster import Cluster, Host


def host(number, **changes):
    values = {
        "transport": "ssh",
        "address": f"10.0.0.{number}",
        "workdir": "/w",
        "python": "/env/bin/python",
        "slots": 2,
    }
    return Host(name=f"pc{number}", **{**values, **changes})


def run(*hosts, words=("train.py", "--name", "a b"), **program):
    cluster = Cluster(name="c", hosts=hosts or (host(1), host(2)))
    made = Program(kind="command", argv=words, **program)
    request = DirectBackend(num_cpus=1).render(
        cluster, command_gang(cluster, "calm-otter-7", 1), port=29511, program=made
    )
    return RunForOthers(cluster=cluster, request=request, program=made)


def test_a_hostfile_has_every_host_with_its_own_slots():
    assert FORMATS["hostfile"](run(host(1, slots=1), host(2, slots=4))) == {
        "hostfile": "10.0.0.1 slots=1\n10.0.0.2 slots=4\n"
    }


def test_torchrun_has_a_file_for_each_host_with_its_own_slots_variables_and_words():
    made = run(host(1, slots=1), host(2, interface="eth7"), host_words={"pc2": ("--batch", "4")})
    files = FORMATS["torchrun"](made)
    assert list(files) == ["torchrun-pc1.sh", "torchrun-pc2.sh"]
    assert "eth7" not in files["torchrun-pc1.sh"]
    assert "export GLOO_SOCKET_IFNAME=eth7\n" in files["torchrun-pc2.sh"]
    assert files["torchrun-pc2.sh"].splitlines()[-1] == (
        "exec /env/bin/python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend static "
        "--master-port 29511 --node-rank 1 --master-addr 10.0.0.1 --local-addr 10.0.0.2 --no-python "
        "/env/bin/python train.py --name 'a b' --batch 4"
    )


def test_deepspeed_has_a_hostfile_the_variables_of_all_ranks_and_the_command():
    files = FORMATS["deepspeed"](run(env={"NCCL_DEBUG": "INFO"}))
    assert files["hostfile"] == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"
    assert "NCCL_DEBUG=INFO\n" in files[".deepspeed_env"]
    assert "GANGLINE" not in files[".deepspeed_env"]
    assert files["deepspeed.sh"].splitlines()[-1] == (
        "exec deepspeed --hostfile hostfile --master_addr 10.0.0.1 --master_port 29511 --no_local_rank train.py "
        "--name 'a b'"
    )


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (("train.py", "--local_rank=$local_rank", "--x"), "--master_port 29511 train.py --x"),
        (("-m", "pkg.train", "--x"), "--no_local_rank --module pkg.train --x"),
        (("./train.sh",), "--no_local_rank --no_python ./train.sh"),
    ],
)
def test_deepspeed_starts_scripts_modules_and_programs(words, end):
    assert FORMATS["deepspeed"](run(words=words))["deepspeed.sh"].rstrip().endswith(end)


def test_accelerate_has_a_file_and_a_command_for_each_host():
    files = FORMATS["accelerate"](run())
    assert (
        "num_machines: 2\nnum_processes: 4\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
        in files["accelerate-pc2.yaml"]
    )
    assert files["accelerate-pc2.sh"].splitlines()[-1] == (
        "exec /env/bin/python -m accelerate.commands.launch --config_file accelerate-pc2.yaml train.py --name 'a b'"
    )


def test_a_batch_script_asks_for_as_many_nodes_and_numbers_them_as_slurm_does():
    text = FORMATS["sbatch"](run(host(1, interface="eth7"), host(2, interface="eth7")))["job.sbatch"]
    assert "#SBATCH --nodes=2\n" in text
    assert '--node-rank "$SLURM_NODEID" --master-addr "$GANG_HEAD" "$@"' in text
    assert "eth7" not in text  # the nodes may be others


@pytest.mark.parametrize("kind", ["accelerate", "sbatch"])
def test_unequal_slots_are_refused_by_what_cannot_have_them(kind):
    with pytest.raises(UsageError, match=r"equally many ranks on every host[\s\S]*pc1: 1, pc2: 2"):
        FORMATS[kind](run(host(1, slots=1), host(2)))


@pytest.mark.parametrize("kind", ["deepspeed", "sbatch"])
def test_what_differs_between_hosts_is_refused_by_what_cannot_say_it(kind):
    with pytest.raises(UsageError, match=r"NCCL_DEBUG differs[\s\S]*pc1: INFO, pc2: None"):
        FORMATS[kind](run(host(1, env={"NCCL_DEBUG": "INFO"}), host(2)))
    with pytest.raises(UsageError, match=r"the same command on every host"):
        FORMATS[kind](run(host_words={"pc2": ("--x",)}))


def test_a_hostfile_cannot_name_one_machine_twice():
    with pytest.raises(UsageError, match=r"a hostfile names a machine once"):
        FORMATS["hostfile"](run(host(1, transport="local", address="127.0.0.1"), host(2, transport="local")))

"""Launchers of other systems, as real users type them: what is taken off, what they would set, and what is refused."""

import shlex
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.launch.launchers.launcher_table import LAUNCHERS, TakenOff, take_off
from gangline.launch.launchers.taking_off import RankPlaces
from gangline.launch.program import require_runnable
from gangline.runs.cluster import Cluster, Host

NOWHERE = Path("/nowhere")
COMMANDS = [
    ("torchrun --nproc-per-node 2 train.py --lr 1e-4", "torchrun", "train.py --lr 1e-4"),
    ("torchrun --standalone --nproc_per_node=gpu -m pkg.train --x 1", "torchrun", "-m pkg.train --x 1"),
    ("python -m torch.distributed.run --nnodes 2 --rdzv-backend c10d train.py", "torchrun", "train.py"),
    ("python3 -u -m torch.distributed.launch --use_env --nproc_per_node 4 train.py -v",
     "torch.distributed.launch", "train.py -v"),
    ("accelerate launch train.py", "accelerate launch", "train.py"),
    ("accelerate launch --multi_gpu --num_processes 8 train.py --lr 1", "accelerate launch", "train.py --lr 1"),
    ("accelerate-launch --num_machines 2 train.py", "accelerate-launch", "train.py"),
    ("accelerate launch --use_deepspeed --zero_stage 2 -m pkg.train", "accelerate launch", "-m pkg.train"),
    ("python -m accelerate.commands.launch --num_processes=2 train.py", "accelerate launch", "train.py"),
    ("python -m accelerate.commands.accelerate_cli launch train.py", "accelerate launch", "train.py"),
    ("uv run accelerate launch --mixed_precision bf16 train.py", "accelerate launch", "train.py"),
    ("deepspeed train.py --deepspeed ds.json", "deepspeed", "train.py '--local_rank=$local_rank' --deepspeed ds.json"),
    ("deepspeed --hostfile hosts --include pc1:0,1 --no_ssh train.py --deepspeed ds.json",
     "deepspeed", "train.py '--local_rank=$local_rank' --deepspeed ds.json"),
    ("deepspeed --module --num_gpus=2 pkg.train", "deepspeed", "-m pkg.train '--local_rank=$local_rank'"),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --master_port 29501 train.py",
     "deepspeed", "train.py '--local_rank=$local_rank'"),
    ("mpirun -np 4 -H pc1:2,pc2:2 -x NCCL_DEBUG=INFO --mca btl_tcp_if_include eth0 --bind-to none python train.py --a b",
     "mpirun", "python train.py --a b"),
    ("mpirun --allow-run-as-root --tag-output -n 2 ./train.sh --fast", "mpirun", "./train.sh --fast"),
    ("mpiexec -ppn 2 -genv OMP_NUM_THREADS 4 -f hosts python3 -m pkg.train", "mpiexec", "python3 -m pkg.train"),
    ("/opt/openmpi/bin/orterun -np 2 python -u train.py", "orterun", "python -u train.py"),
    ("OMP_NUM_THREADS=1 mpirun -n 2 env FOO=1 python train.py", "mpirun", "python train.py"),
    ("env A=1 mpirun -n 2 python train.py", "mpirun", "python train.py"),
    ("nohup mpirun -n 2 python train.py", "mpirun", "python train.py"),
    ("horovodrun -np 4 -H pc1:2,pc2:2 --gloo python train.py --lr 1", "horovodrun", "python train.py --lr 1"),
    ("srun --nodes=2 --ntasks-per-node=4 --gpus-per-node 4 -l python train.py", "srun", "python train.py"),
    ("srun -N2 -n 8 --exclusive --export=ALL train.py", "srun", "train.py"),
    ("pdsh -R ssh -w pc[1-3] python train.py", "pdsh", "python train.py"),
    ("parallel-ssh -i -h hosts.txt -t 0 python train.py", "parallel-ssh", "python train.py"),
    ("pssh -H 'pc1 pc2' python train.py", "pssh", "python train.py"),
    ("clush -w pc[1-2] python train.py", "clush", "python train.py"),
    ("ray job submit --address http://pc1:8265 --working-dir . --no-wait -- python train.py",
     "ray job submit", "python train.py"),
    ("colossalai run --nproc_per_node 2 --hostfile hosts train.py", "colossalai run", "train.py"),
    ("conda run -n train torchrun train.py", "torchrun", "train.py"),
    ("poetry run torchrun --nproc-per-node=2 train.py", "torchrun", "train.py"),
]  # fmt: skip


BY_FILE = {"sbatch job.sh": "sbatch", "salloc -N 2 srun python train.py": "salloc",
           "ray submit cluster.yaml train.py": "ray submit", "ray start --head": "ray start",
           "tune run --nproc_per_node 2 lora_finetune_distributed --config x": "tune run",
           "python -m deepspeed.launcher.launch --world_info=e30= train.py": "deepspeed.launcher.launch"}  # fmt: skip


def off(command, folder=NOWHERE, **variables):
    return take_off(shlex.split(command), folder=folder, variables=variables)


@pytest.mark.parametrize(("command", "name", "program"), COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_a_launcher_is_taken_off_and_the_program_that_it_would_start_is_left(command, name, program):
    taken = off(command)
    assert shlex.join(taken.words) == program
    assert taken.notes[0] == f"{name}: taken off, gangline starts the ranks itself"
    require_runnable(taken.words)


@pytest.mark.parametrize(("command", "name"), BY_FILE.items())
def test_a_launcher_whose_program_stands_elsewhere_is_refused(command, name):
    with pytest.raises(UsageError, match=rf"^{name} starts ranks itself"):
        off(command)


@pytest.mark.parametrize(
    "command",
    [
        "train.py --launcher mpirun",
        "python train.py -m torch.distributed.run",
        "env FOO=1 python train.py",
        "uv run train.py",
        "uv pip list",
        "accelerate env",
        "ray status",
        "tune ls",
        "./mpirun.py",
        "nohup",
        "bash train.sh",
    ],
)
def test_other_commands_are_no_launchers(command):
    assert off(command) == TakenOff(words=tuple(shlex.split(command)), env={}, placement=None, restarts=0, notes=())


def test_assignments_in_front_of_a_script_are_variables_of_its_ranks():
    taken = off("SIZE=5 NAME= train.py RATE=1 --x Y=2")
    assert (taken.words, taken.env) == (("train.py", "RATE=1", "--x", "Y=2"), {"SIZE": "5", "NAME": ""})
    assert off("ONLY=5").words == ("ONLY=5",)
    with pytest.raises(UsageError, match=r"MY_PASSWORD"):
        off("MY_PASSWORD=x train.py")


def test_every_launcher_of_the_table_has_a_command_here():
    names = {name.split()[0] for _, name, _ in COMMANDS} | {name.split()[0] for name in BY_FILE.values()}
    assert {launcher.programs[0] for launcher in LAUNCHERS} <= names


def placed(command):
    return off(command).placement


def test_what_gangline_decides_is_said_to_be_dropped():
    notes = off("torchrun --nnodes 2 --node-rank=1 --master-addr pc1 --standalone --tee 3 train.py").notes
    assert notes[1:] == (
        "--nnodes 2: dropped; hosts stand in the cluster file",
        "--node-rank 1: dropped; hosts stand in the cluster file",
        "--master-addr pc1: dropped; gangline chooses the address and the port",
        "--standalone: dropped; gangline chooses the address and the port",
        "--tee 3: dropped; every rank has a log: gangline logs",
    )


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 3 train.py", 3),
        ("torchrun --nproc_per_node=3 train.py", 3),
        ("torchrun --nproc-per-node gpu train.py", None),
        ("deepspeed --num_gpus 3 train.py", 3),
        ("accelerate launch --num_processes 6 --num_machines 2 train.py", 3),
        ("mpirun -np 6 -npernode 3 python train.py", 3),
        ("mpirun --map-by ppr:3:node python train.py", 3),
        ("mpirun -N 3 python train.py", 3),
        ("mpiexec -n 6 -ppn 3 python train.py", 3),
        ("srun -N2 --ntasks-per-node=3 python train.py", 3),
        ("srun --ntasks-per-node=1 torchrun --nproc-per-node 3 train.py", 3),
        ("srun --ntasks-per-node=1 torchrun train.py", None),
        ("mpirun -np 6 python train.py", None),
    ],
)
def test_the_number_of_ranks_on_every_host_is_honoured(command, ranks):
    assert (placed(command) or RankPlaces()).ranks_per_host == ranks


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("mpirun -x NCCL_DEBUG=INFO -x FROM_SHELL -x ABSENT python train.py", {"NCCL_DEBUG": "INFO", "FROM_SHELL": "7"}),
        ("mpiexec -genv A 1 -env B 2 -genvlist FROM_SHELL,ABSENT python train.py",
         {"A": "1", "B": "2", "FROM_SHELL": "7"}),
        ("srun --export=ALL,A=1,FROM_SHELL python train.py", {"A": "1", "FROM_SHELL": "7"}),
        ("A=1 env B=2 torchrun train.py", {"A": "1", "B": "2"}),
        ("mpirun -n 2 env A=1 python train.py", {"A": "1"}),
        ("""ray job submit --runtime-env-json '{"env_vars": {"A": 1}}' -- python train.py""", {"A": "1"}),
        ("MASTER_PORT=29501 RANK=0 torchrun train.py", {}),
        ("mpirun -x HF_TOKEN=secret python train.py", {}),
    ],
)  # fmt: skip
def test_variables_of_a_launcher_reach_the_ranks(command, env):
    assert off(command, FROM_SHELL="7").env == env


def test_deepspeed_reads_its_file_of_variables_and_tells_scripts_their_local_rank(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\n\nA=b=c\n")
    taken = off("deepspeed train.py --x 1", folder=tmp_path)
    assert taken.env == {"NCCL_IB_DISABLE": "1", "A": "b=c"}
    assert taken.words == ("train.py", "--local_rank=$local_rank", "--x", "1")
    assert off("deepspeed --no_local_rank train.py").words == ("train.py",)


CLUSTER = Cluster(
    name="c",
    hosts=tuple(Host(name=f"pc{at}", address=f"10.0.0.{at}", workdir="/w", python="/p", slots=4) for at in (1, 2, 3)),
)


@pytest.mark.parametrize(
    ("command", "slots"),
    [
        ("deepspeed --include pc1@pc3:1,2 t.py", {"pc1": (4, None), "pc3": (2, "1,2")}),
        ("deepspeed --include 10.0.0.2:3 t.py", {"pc2": (1, "3")}),
        ("deepspeed --exclude pc2@pc3:0 t.py", {"pc1": (4, None), "pc3": (3, "1,2,3")}),
        ("deepspeed --num_nodes 2 --num_gpus 2 t.py", {"pc1": (2, None), "pc2": (2, None)}),
        ("torchrun --nproc-per-node 8 t.py", {"pc1": (8, None), "pc2": (8, None), "pc3": (8, None)}),
    ],
)
def test_hosts_and_slots_that_a_launcher_chooses_are_those_of_the_run(command, slots):
    hosts = placed(command).on(CLUSTER).hosts
    assert {host.name: (host.slots, host.env.get("CUDA_VISIBLE_DEVICES")) for host in hosts} == slots


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("deepspeed --include pc9 t.py", r"pc9 is no host of this cluster"),
        ("deepspeed --include pc1:4 t.py", r"pc1 has no slot 4"),
        ("deepspeed --num_nodes 4 t.py", r"wants 4 hosts, and the cluster has 3"),
        ("deepspeed --exclude pc1@pc2@pc3 t.py", r"no slot is left"),
    ],
)
def test_a_choice_that_the_cluster_cannot_meet_is_refused(command, what):
    with pytest.raises(UsageError, match=what):
        placed(command).on(CLUSTER)


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("torchrun --virtual-local-rank train.py", r"torchrun: --virtual-local-rank cannot be honoured"),
        ("torchrun --nproc-per-node many train.py", r"--nproc-per-node many cannot be honoured"),
        ("torchrun --no-such-option train.py", r"--no-such-option cannot be honoured"),
        ("torchrun --nproc-per-node", r"--nproc-per-node cannot be honoured"),
        ("torchrun --nproc-per-node 2", r"torchrun has no program to start"),
        ("deepspeed --autotuning tune train.py", r"deepspeed: --autotuning tune"),
        ("deepspeed --include pc1 --exclude pc2 train.py", r"--include with --exclude"),
        ("deepspeed --launcher OpenMPI --launcher_args='-x A=1' train.py", r"deepspeed: --launcher_args -x A=1"),
        ("accelerate launch --use_megatron_lm train.py", r"--use_megatron_lm"),
        ("accelerate launch --tpu train.py", r"--tpu"),
        ("mpirun -n 1 python a.py : -n 1 python b.py", r"between several programs"),
        ("mpirun -wdir /data python train.py", r"-wdir /data"),
        ("mpirun -x MY_API_KEY=1 python train.py", r"MY_API_KEY"),
        ("srun --multi-prog job.conf", r"--multi-prog"),
        ("srun --container-image=x python train.py", r"--container-image x"),
        ("pdsh -w pc1 'cd /x && python train.py'", r"gangline starts no shell"),
        ("ray job submit --working-dir other -- python train.py", r"--working-dir other"),
        ("""ray job submit --runtime-env-json '{"pip": []}' -- python train.py""", r"--runtime-env-json with pip"),
        ("timeout 60 torchrun train.py", r"timeout in front of it"),
        ("sudo torchrun train.py", r"sudo in front of it"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(command, what):
    with pytest.raises(UsageError, match=what):
        off(command)


def test_words_for_the_pdsh_of_deepspeed_are_not_needed():
    taken = off("deepspeed --launcher=pdsh --launcher_args=-S --num_nodes 1 train.py")
    assert [note.partition(":")[0] for note in taken.notes[1:]] == [
        "--launcher pdsh",
        "--num_nodes 1",
        "--launcher_args -S",
    ]
    assert taken.notes[2].endswith("on the first host of the cluster file")


@pytest.mark.parametrize("line", ["import horovod.torch as hvd", "from mpi4py import MPI", "import ray"])
def test_a_script_whose_ranks_only_its_own_launcher_starts_is_refused(tmp_path, line):
    (tmp_path / "train.py").write_text(f"import os\n{line}\n")
    with pytest.raises(UsageError, match=r"each rank would train alone"):
        off("mpirun -n 2 python train.py", folder=tmp_path)
    (tmp_path / "train.py").write_text(f"if True:\n    {line}\n")
    assert off("mpirun -n 2 python train.py", folder=tmp_path).words == ("python", "train.py")


def test_accelerate_reads_its_file_below_what_the_command_says(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\n"
        "num_processes: 4\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    taken = off("accelerate launch --config_file a.yaml --fsdp_offload_params false train.py", folder=tmp_path)
    assert (taken.env["FSDP_VERSION"], taken.env["FSDP_OFFLOAD_PARAMS"]) == ("2", "false")
    assert (taken.env["ACCELERATE_USE_FSDP"], taken.env["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")
    assert taken.placement == RankPlaces(ranks_per_host=2)


def test_restarts_of_torchrun_are_those_of_the_run():
    assert off("torchrun --max-restarts 3 train.py").restarts == 3

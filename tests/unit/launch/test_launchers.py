"""Launchers of other systems are recognised as real users type them, and the program that they would start is found."""

import shlex

import pytest

from gangline.errors import UsageError
from gangline.launch.program import LAUNCHERS, find_launcher, require_runnable

COMMANDS = [
    ("torchrun --nproc-per-node 2 train.py --lr 1e-4", "torchrun", "train.py --lr 1e-4"),
    ("torchrun --standalone --nproc_per_node=gpu -m pkg.train --x 1", "torchrun", "-m pkg.train --x 1"),
    ("python -m torch.distributed.run --nnodes 2 --rdzv-backend c10d train.py", "torchrun", "train.py"),
    ("python3 -u -m torch.distributed.launch --use_env --nproc_per_node 4 train.py -v", "torch.distributed.launch",
     "train.py -v"),
    ("accelerate launch train.py", "accelerate launch", "train.py"),
    ("accelerate launch --config_file a.yaml --multi_gpu --num_processes 8 train.py --lr 1", "accelerate launch",
     "train.py --lr 1"),
    ("accelerate launch --use_deepspeed --zero_stage 2 -m pkg.train", "accelerate launch", "-m pkg.train"),
    ("python -m accelerate.commands.launch --num_processes=2 train.py", "accelerate launch", "train.py"),
    ("python -m accelerate.commands.accelerate_cli launch train.py", "accelerate launch", "train.py"),
    ("uv run accelerate launch --mixed_precision bf16 train.py", "accelerate launch", "train.py"),
    ("deepspeed train.py --deepspeed ds.json", "deepspeed", "train.py --deepspeed ds.json"),
    ("deepspeed --hostfile hosts --include pc1:0,1 --no_ssh train.py --deepspeed ds.json", "deepspeed",
     "train.py --deepspeed ds.json"),
    ("deepspeed --module --num_gpus=2 pkg.train", "deepspeed", "-m pkg.train"),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --master_port 29501 train.py", "deepspeed", "train.py"),
    ("mpirun -np 4 -H pc1:2,pc2:2 -x NCCL_DEBUG=INFO --mca btl_tcp_if_include eth0 --bind-to none python train.py --a b",
     "mpirun", "train.py --a b"),
    ("mpirun --allow-run-as-root --tag-output -n 2 ./train.sh --fast", "mpirun", "./train.sh --fast"),
    ("mpiexec -ppn 2 -genv OMP_NUM_THREADS 4 -f hosts python3 -m pkg.train", "mpiexec", "-m pkg.train"),
    ("/opt/openmpi/bin/orterun -np 2 python -u train.py", "orterun", "python -u train.py"),
    ("OMP_NUM_THREADS=1 mpirun -n 2 env FOO=1 python train.py", "mpirun", "train.py"),
    ("env -u DISPLAY A=1 mpirun -n 2 python train.py", "mpirun", "train.py"),
    ("nohup mpirun -n 2 python train.py", "mpirun", "train.py"),
    ("nice -n 10 mpirun -n 2 python train.py", "mpirun", "train.py"),
    ("horovodrun -np 4 -H pc1:2,pc2:2 --gloo python train.py --lr 1", "horovodrun", "train.py --lr 1"),
    ("srun --nodes=2 --ntasks-per-node=4 --gpus-per-node 4 -l python train.py", "srun", "train.py"),
    ("srun -N2 -n 8 --exclusive --export=ALL train.py", "srun", "train.py"),
    ("sbatch job.sh", "sbatch", ""),
    ("salloc -N 2 srun python train.py", "salloc", ""),
    ("pdsh -R ssh -w pc[1-3] python train.py", "pdsh", "train.py"),
    ("parallel-ssh -i -h hosts.txt -t 0 python train.py", "parallel-ssh", "train.py"),
    ("pssh -H 'pc1 pc2' python train.py", "pssh", "train.py"),
    ("clush -w pc[1-2] python train.py", "clush", "train.py"),
    ("ray job submit --address http://pc1:8265 --working-dir . --no-wait -- python train.py", "ray job submit",
     "train.py"),
    ("ray submit cluster.yaml train.py", "ray submit", ""),
    ("ray start --head", "ray start", ""),
    ("colossalai run --nproc_per_node 2 --hostfile hosts train.py", "colossalai run", "train.py"),
    ("tune run --nproc_per_node 2 lora_finetune_distributed --config x", "tune run", ""),
    ("conda run -n train torchrun train.py", "torchrun", "train.py"),
    ("poetry run torchrun --nproc-per-node=2 train.py", "torchrun", "train.py"),
    ("timeout 3600 torchrun train.py", "torchrun", "train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "name", "program"), COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_a_launcher_is_named_and_the_program_that_it_would_start_is_found(command, name, program):
    found = find_launcher(shlex.split(command))
    assert (found.name, shlex.join(found.program)) == (name, program)
    with pytest.raises(UsageError) as caught:
        require_runnable(tuple(shlex.split(command)))
    assert caught.value.what.startswith(f"{name} starts ranks itself")
    assert f"gangline run -- {program or 'train.py --option value'};" in caught.value.fix


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
    assert find_launcher(shlex.split(command)) is None


def test_every_launcher_of_the_table_has_a_command_here():
    names = {name.split()[0] for _, name, _ in COMMANDS}
    assert {launcher.programs[0] for launcher in LAUNCHERS} <= names

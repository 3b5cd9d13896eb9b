"""Launch commands as guides write them for other launchers, through `gangline run` on real hosts.

The forms are those of two guides to clusters: torchrun typed on each node, OpenMPI's mpirun, DeepSpeed's launcher with a
hostfile, with pdsh and with the address of its master, pdsh with a torchrun behind it, and a batch script of Slurm.
Their numbers are for clusters of 24 and 32 ranks; here are three.
"""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser, processes_of_runs

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sums {int(total)}", *words, os.environ.get("NCCL_DEBUG"), flush=True)
dist.destroy_process_group()
"""
MEETS = "--master_addr=192.0.2.100 --master_port=29500"
"""Of another network: gangline chooses where ranks meet."""
RUN = {
    "torchrun-on-a-node": (f"torchrun --nproc_per_node=2 --nnodes=4 --node_rank=0 {MEETS} train.py", 4, "None"),
    "mpirun": (
        (
            "mpirun -np 24 -H master:8,worker1:8,worker2:8 --bind-to none --map-by slot -x MASTER_ADDR=master "
            "-x MASTER_PORT=29500 -x NCCL_DEBUG=INFO -x NCCL_IB_DISABLE=0 python train.py"
        ),
        3,
        "INFO",
    ),
    "deepspeed": (
        (
            "deepspeed --hostfile=hostfile --num_nodes=2 --num_gpus=1 --launcher=pdsh --launcher_args=-S "
            "train.py --deepspeed_config=ds_config.json"
        ),
        2,
        "--deepspeed_config=ds_config.json None",
    ),
    "pdsh": (
        (
            f"pdsh -w node[1-4] python -m torch.distributed.run --nproc_per_node=1 --nnodes=4 --node_rank=0 {MEETS} "
            "train.py --deepspeed"
        ),
        2,
        "--deepspeed None",
    ),
}
"""Command, ranks, and what each prints behind their sum."""
CORRECTED = {
    "sbatch train.slurm": "sbatch starts ranks itself",
    "ray start --head --port=6379 --num-gpus=8": "ray start starts",
    f"pdsh -w node1 'cd /shared && RANK=0 python -m torch.distributed.run {MEETS} train.py'": "gangline starts no shell",
}
"""Lines that cannot run as they are -> what the refusal says."""


def test_their_commands_start_the_ranks_that_they_mean_and_what_cannot_run_says_what_to_write(lab):
    made = lab(2, binds=lab_folders(), ttl_s=900)
    user = NewUser(made.user)
    user.describes("h0", "h1", python=sys.executable)
    user.desk.write("cluster.yaml", user.desk.read("cluster.yaml").decode().replace("slots: 1", "slots: 2", 1))
    for name, text in (("train.py", SCRIPT), ("ds_config.json", "{}")):
        user.desk.write(f"job/{name}", text)
    for name, (command, num_ranks, printed) in RUN.items():
        done = user.types("run", "--dir", "job", "--", *shlex.split(command), timeout_s=300)
        run = re.search(r"run (\S+) started", done.stderr)[1]
        said = re.findall(r"rank (\d) of (\d) sums (\d) (.*)", user.types("logs", run).stdout)
        wanted = [(str(rank), str(num_ranks), str(num_ranks), printed) for rank in range(num_ranks)]
        assert sorted(said) == wanted, (name, done.stderr)
        assert not any(processes_of_runs(host) for host in made.hosts), name
    for command, words in CORRECTED.items():
        done = user.types("run", "--dir", "job", "--dry-run", "--", *shlex.split(command), code=2)
        assert words in done.stderr
        assert "gangline run" in done.stderr

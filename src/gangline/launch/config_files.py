"""Files with which other launchers start the ranks of a request: the same hosts, ranks and variables. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gangline.errors import UsageError
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.program import Program, rank_words
from gangline.runs.cluster import Cluster

LOCAL_RANK_WORDS = {"--local_rank=$local_rank", "--local-rank=$local_rank"}
"""Words of a command that another launcher has told its ranks; torchrun puts the number there."""
OURS = {"GANGLINE_HOST"}
"""Variables that mean something to gangline only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForOthers:
    """What files for another launcher are made of."""

    cluster: Cluster
    request: LaunchRequest
    program: Program

    @property
    def meet(self) -> tuple[str, int]:
        """Address and port on the head that the ranks meet at."""
        meet = self.request.hosts[0].meet
        assert meet is not None, "a request of torchrun"
        return meet

    def address(self, part: HostRequest) -> str:
        """Where the others reach a host."""
        return self.meet[0] if self.cluster.is_one_machine else self.cluster.host(part.host).address

    def variables(self, part: HostRequest) -> dict[str, str]:
        """Those of the ranks of a host."""
        return {name: value for name, value in part.env.items() if name not in OURS}

    def words(self, part: HostRequest) -> tuple[str, ...]:
        """The command of the ranks of a host, without gangline's part."""
        return (*self.program.argv, *self.program.host_words.get(part.host, ()))

    def common_words(self, program: str) -> tuple[str, ...]:
        """The command of all ranks; raises UsageError where hosts differ, which a program cannot say."""
        if self.program.host_words:
            raise UsageError(
                f"{program} starts the same command on every host",
                seen=f"--host-args for {', '.join(self.program.host_words)}",
                fix="gangline export-config torchrun has a file for each host",
            )
        return self.program.argv

    def common_variables(self, program: str) -> dict[str, str]:
        """Those of all ranks; raises UsageError where hosts differ, which a program cannot say."""
        first, *others = [self.variables(part) for part in self.request.hosts]
        for name in sorted({name for each in (first, *others) for name in each}):
            values = [each.get(name) for each in (first, *others)]
            if len(set(values)) > 1:
                hosts = zip(self.request.names, values, strict=True)
                raise UsageError(
                    f"{program} hands the same variables to every host, and {name} differs",
                    seen=", ".join(f"{host}: {value}" for host, value in hosts),
                    fix="gangline export-config torchrun has a file for each host",
                )
        return first

    def equal_slots(self, program: str) -> int:
        """The ranks of each host; raises UsageError where they differ, which a program cannot say."""
        counts = {part.host: len(part.ranks) for part in self.request.hosts}
        if len(set(counts.values())) > 1:
            raise UsageError(
                f"{program} starts equally many ranks on every host",
                seen=", ".join(f"{host}: {count}" for host, count in counts.items()),
                fix="gangline export-config torchrun, deepspeed and hostfile take any numbers",
            )
        return next(iter(counts.values()))


def hostfile(run: RunForOthers) -> dict[str, str]:
    """For mpirun of OpenMPI and for DeepSpeed; it has no variables."""
    lines = [f"{run.address(part)} slots={len(part.ranks)}" for part in run.request.hosts]
    addresses = [line.split()[0] for line in lines]
    if len(set(addresses)) < len(addresses):
        raise UsageError(
            "a hostfile names a machine once, and hosts of this cluster are one machine",
            seen=", ".join(addresses),
            fix="write them as one host with more slots",
        )
    return {"hostfile": _text(lines)}


def deepspeed(run: RunForOthers) -> dict[str, str]:
    """A hostfile, variables, and the command, to be typed where ssh reaches every host."""
    address, port = run.meet
    given = run.common_words("DeepSpeed")
    words = [word for word in given if word not in LOCAL_RANK_WORDS]
    options = ["--hostfile", "hostfile", "--master_addr", address, "--master_port", str(port)]
    options += [] if len(words) < len(given) else ["--no_local_rank"]
    if words[0] == "-m":
        options, words = [*options, "--module"], words[1:]
    elif not words[0].endswith(".py"):
        options = [*options, "--no_python"]
    variables = run.common_variables("DeepSpeed")
    return {
        **hostfile(run),
        ".deepspeed_env": _text([f"{name}={value}" for name, value in variables.items()]),
        "deepspeed.sh": _script([f"exec deepspeed {shlex.join([*options, *words])}"]),
    }


def accelerate(run: RunForOthers) -> dict[str, str]:
    """A configuration and a command for each host."""
    run.equal_slots("accelerate")
    address, port = run.meet
    size = sum(len(part.ranks) for part in run.request.hosts)
    found = {}
    for number, part in enumerate(run.request.hosts):
        name = f"accelerate-{part.host}.yaml"
        values = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if size > 1 else "'NO'",
            "num_machines": len(run.request.hosts),
            "num_processes": size,
            "machine_rank": number,
            "main_process_ip": address,
            "main_process_port": port,
            "rdzv_backend": "static",
            "same_network": "true",
            "mixed_precision": f"'{part.env.get('ACCELERATE_MIXED_PRECISION', 'no')}'",
        }
        found[name] = _text([f"{key}: {value}" for key, value in values.items()])
        words = [word for word in run.words(part) if word not in LOCAL_RANK_WORDS]
        kind = ["--module"] if words[0] == "-m" else [] if words[0].endswith(".py") else ["--no_python"]
        launcher = run.cluster.host(part.host).argv("-m", "accelerate.commands.launch")
        command = [*launcher, "--config_file", name, *kind, *words[words[0] == "-m" :]]
        found[f"accelerate-{part.host}.sh"] = _script([*_exports(run, part), f"exec {shlex.join(command)}"])
    return found


def torchrun(run: RunForOthers) -> dict[str, str]:
    """A command for each host."""
    found = {}
    for number, part in enumerate(run.request.hosts):
        command = shlex.join(_torchrun_words(run, number, part))
        found[f"torchrun-{part.host}.sh"] = _script([*_exports(run, part), f"exec {command}"])
    return found


def sbatch(run: RunForOthers) -> dict[str, str]:
    """A batch script for as many nodes, which Slurm chooses."""
    slots = run.equal_slots("a batch script")
    variables = run.common_variables("a batch script")
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of these hosts; the nodes may be others
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name not in interfaces]
    python = run.cluster.head.python
    words = shlex.join([*run.cluster.head.argv(), *_torchrun(run, slots), "--no-python"])
    program = shlex.join(rank_words(run.common_words("a batch script"), python=python))
    return {
        "job.sbatch": "\n".join(
            [
                "#!/bin/bash",
                f"#SBATCH --job-name={run.cluster.name}",
                f"#SBATCH --nodes={len(run.request.hosts)}",
                "#SBATCH --ntasks-per-node=1",
                *lines,
                'export GANG_HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
                "srun --kill-on-bad-exit=1 bash -c "
                + shlex.quote(f'exec {words} --node-rank "$SLURM_NODEID" --master-addr "$GANG_HEAD" "$@"')
                + f" rank {program}",
                "",
            ]
        )
    }


RAY_JOB = """\
# After `sh ray-HOST.sh` on each host, the first one first, on that one, in the folder of the script, which is the same
# on every host: python ray_job.py. Its exit code is 0 if all ranks ended well.
import json
import os
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HOSTS = json.loads({hosts})


@ray.remote(max_retries=0)
def start(host, folder):
    env = {{**os.environ, **host["env"]}}
    return subprocess.run(host["argv"], cwd=folder, env=env, check=False).returncode


ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
alive = [node for node in ray.nodes() if node["Alive"]]
nodes = {{node["NodeManagerAddress"]: node for node in alive}}
nodes[""] = {{node["NodeID"]: node for node in alive}}[ray.get_runtime_context().get_node_id()]
missing = [host["name"] for host in HOSTS if host["address"] not in nodes]
if missing:
    sys.exit(f"no nodes of this cluster: {{', '.join(missing)}}; its nodes are {{', '.join(filter(None, nodes))}}")
tasks = []
for host in HOSTS:
    node = nodes[host["address"]]
    gpus = host["gpus"] if node["Resources"].get("GPU") else 0
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = start.options(num_cpus=0 if gpus else host["ranks"], num_gpus=gpus, scheduling_strategy=where)
    tasks.append(task.remote(host, os.getcwd()))
sys.exit(max(map(abs, ray.get(tasks))))
"""


def ray(run: RunForOthers) -> dict[str, str]:
    """A command for each host that makes it a node of Ray, and a program that starts torchrun on all of them."""
    head, rows, found = run.address(run.request.hosts[0]), [], {}
    for number, part in enumerate(run.request.hosts):
        address = "" if run.cluster.is_one_machine else run.address(part)
        gpus = 0 if run.cluster.host(part.host).gpu == {} else len(set(part.devices))
        room = {"ranks": len(part.ranks), "gpus": gpus}
        argv = _torchrun_words(run, number, part)
        rows.append({"name": part.host, "address": address, "env": run.variables(part), "argv": argv, **room})
        if run.cluster.is_one_machine and number:
            continue
        whose = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if not number else []
        whose = whose or [f"--address={head}:{RAY_PORT}"]
        own = [f"--node-ip-address={address}"] if address else []
        size = [f"--num-cpus={run.cluster.host(part.host).slots}"]
        words = ["ray", "start", *whose, *own, *size, "--disable-usage-stats"]
        note = "# RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token, has the token, the same on every host: ray get-auth-token"
        found[f"ray-{part.host}.sh"] = _script([note, "export RAY_AUTH_MODE=token", f"exec {shlex.join(words)}"])
    return {**found, "ray_job.py": RAY_JOB.format(hosts=repr(json.dumps(rows)))}


RAY_PORT = 6379
"""Where the first node of Ray listens, as Ray has it."""
FORMATS: Mapping[str, Callable[[RunForOthers], dict[str, str]]] = {
    "hostfile": hostfile,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "torchrun": torchrun,
    "sbatch": sbatch,
    "ray": ray,
}
"""What `gangline export-config` writes -> name and text of each file."""


def _torchrun(run: RunForOthers, num_ranks: int) -> list[str]:
    return [
        *("-m", "torch.distributed.run", "--nnodes", str(len(run.request.hosts)), "--nproc-per-node", str(num_ranks)),
        *("--rdzv-backend", "static", "--master-port", str(run.meet[1])),
    ]


def _torchrun_words(run: RunForOthers, number: int, part: HostRequest) -> list[str]:
    """The torchrun of one host."""
    host = run.cluster.host(part.host)
    options = [*_torchrun(run, len(part.ranks)), "--node-rank", str(number)]
    options += ["--master-addr", run.meet[0], "--local-addr", run.address(part)]
    return [*host.argv(), *options, "--no-python", *rank_words(run.words(part), python=host.python)]


def _exports(run: RunForOthers, part: HostRequest) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in run.variables(part).items()]


def _script(lines: list[str]) -> str:
    return _text(["#!/bin/sh", *lines])


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"

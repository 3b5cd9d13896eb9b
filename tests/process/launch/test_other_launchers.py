"""The tables of other launchers beside their own parsers, and the variables of accelerate beside those that it sets."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from gangline.launch.launchers.accelerate_options import ACCELERATE
from gangline.launch.launchers.deepspeed_options import DEEPSPEED
from gangline.launch.launchers.launcher_table import take_off
from gangline.launch.launchers.mpi_options import MPI
from gangline.launch.launchers.shell_options import PDSH
from gangline.launch.launchers.srun_options import SRUN
from gangline.launch.launchers.torchrun_options import TORCHRUN

FILE = """\
compute_environment: LOCAL_MACHINE
debug: false
num_machines: 1
num_processes: 2
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
use_cpu: false
"""
FILES = {
    "fsdp.yaml": FILE
    + """\
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_cpu_ram_efficient_loading: true
  reshard_after_forward: false
""",
    "zero3.yaml": FILE
    + """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: true
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
""",
    "zero_file.yaml": FILE
    + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n",
    "many.yaml": FILE
    + "distributed_type: MULTI_GPU\nmixed_precision: fp16\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
    "  dynamo_mode: max-autotune\n  dynamo_use_dynamic: true\n",
    "parallel.yaml": FILE + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
    "  parallelism_config_dp_shard_size: 2\n  parallelism_config_cp_size: 2\n",
    "cpu.yaml": FILE.replace("use_cpu: false", "use_cpu: true") + "distributed_type: 'NO'\n",
}
COMMANDS = [
    "--multi_gpu --num_processes 2",
    "--multi_gpu --num_processes 2 --mixed_precision bf16 --dynamo_backend inductor --debug --enable_cpu_affinity",
    "--multi-gpu --num-processes 2 --num-cpu-threads-per-process 4 --gpu-ids 0,1 --dynamo-use-fullgraph",
    "--cpu --num_processes 2",
    "--use_fsdp --num_processes 2 --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_min_num_params 7",
    "--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT",
    "--use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 2 --parallelism_config_tp_size 2",
    "--use_deepspeed --num_processes 2 --zero_stage 2 --gradient_clipping 1.0 --offload_param_device None",
    "--use_deepspeed --num_processes 2 --deepspeed_config_file ds.json --zero3_save_16bit_model True",
    *(f"--config_file {name}" for name in FILES),
    "--config_file fsdp.yaml --mixed_precision no --fsdp_offload_params false --fsdp_version 1",
    "--config_file zero3.yaml --mixed_precision fp16 --zero_stage 1",
    "--config_file zero3.yaml --multi_gpu",
]
DECIDED = {"MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
"""Variables that gangline sets otherwise."""
UNSAID = {"OMP_NUM_THREADS"}
"""Where the command does not say it, gangline decides."""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the launchers of this environment say of themselves."""
    folder = tmp_path_factory.mktemp("real")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    asked = [[str(folder / word) if word in FILES else word for word in command.split()] for command in COMMANDS]
    env = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.process.launch.real_launchers"],
        input=json.dumps(asked),
        env=env,
        text=True,
        capture_output=True,
        check=True,
    )
    return {**json.loads(done.stdout.splitlines()[-1]), "folder": folder}


@pytest.mark.parametrize(
    ("name", "table"), [("torchrun", TORCHRUN), ("accelerate", ACCELERATE), ("deepspeed", DEEPSPEED)]
)
def test_a_table_has_every_option_of_the_real_parser_and_takes_as_many_values(real, name, table):
    options = {option: values for option, values in real[name].items() if option not in {"-h", "--help"}}
    assert {option: getattr(table.row(option), "num_values", None) for option in options} == options
    ours = {option for row in table.rows for option in row.names}
    assert {_plain(option) for option in ours} == {_plain(option) for option in options}


def _plain(option):
    return option.replace("_", "-")


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=COMMANDS)
def test_the_variables_of_accelerate_are_the_ones_that_it_sets(real, number):
    words = ("accelerate", "launch", *COMMANDS[number].split(), "train.py")
    ours = take_off(words, folder=real["folder"], variables={}).env
    theirs = real["variables"][number]
    wanted = {name: value for name, value in theirs.items() if name not in DECIDED | UNSAID}
    if wanted.get("ACCELERATE_USE_CPU") == "False":  # as if it were not set
        del wanted["ACCELERATE_USE_CPU"]
    assert {name: value for name, value in ours.items() if name not in UNSAID} == wanted
    if "OMP_NUM_THREADS" in ours:
        assert ours["OMP_NUM_THREADS"] == theirs["OMP_NUM_THREADS"]


def _help(*argv, **variables):
    if shutil.which(argv[0]) is None:
        pytest.skip(f"no {argv[0]} here")
    done = subprocess.run(argv, env={**os.environ, **variables}, text=True, capture_output=True)
    return done.stdout + done.stderr


def _missing(table, names):
    """Names of options that a table lacks, or whose number of values differs."""
    found = {name: table.row(name) for name in names}
    return {name: names[name] for name, row in found.items() if row is None or not _takes(row, names[name])}


def _takes(row, wanted):
    return row.is_optional if wanted == "optional" else not row.is_optional and row.num_values == wanted


def test_every_option_of_openmpis_mpirun_is_known():
    text = _help("mpirun", "--help", "all", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    names = {}
    for options, values in re.findall(r"^ *(-\S+) ((?:<arg\d> ?)*)", text, re.MULTILINE):
        names |= dict.fromkeys(options.split("|"), values.count("<arg"))
    assert len(names) > 100
    assert set(_missing(MPI, names)) == {"-h", "--help"}


UNMARKED = {"--container", "--bcast", "--pty", "--resv-ports", "-k", "--no-kill", "-K", "--kill-on-bad-exit"}
"""Options of srun whose help does not say that a value follows, or may be left out."""


def test_every_option_of_srun_is_known(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    text = _help("srun", "--help", SLURM_CONF=str(tmp_path / "slurm.conf"))
    names = {}
    for short, name, value in re.findall(r"^ +(-\w)?,? *(--[a-z-]+)(\[?=)?", text, re.MULTILINE):
        takes = {"": 0, "=": 1, "[=": "optional"}[value]
        names = dict.fromkeys(filter(None, (short, name)), takes) | names
    assert len(names) > 100
    assert set(_missing(SRUN, names)) - {"-h", "--help", "--usage", "-V", "--version"} == UNMARKED


def test_every_option_of_pdsh_is_known():
    text = _help("pdsh", "-h")
    names = {name: int(bool(value)) for name, value in re.findall(r"^(-\w)( [a-z]\S*)?  ", text, re.MULTILINE)}
    assert "-w" in names
    assert set(_missing(PDSH, names)) == {"-h", "-V", "-q", "-L"}

"""The launcher of DeepSpeed: its options (`deepspeed.launcher.runner.parse_args`)."""

from __future__ import annotations

from pathlib import Path

from gangline.launch.launchers.taking_off import (
    IN_CLUSTER_FILE,
    MEETING,
    OUTPUT,
    OptionTable,
    Wishes,
    dropped,
    kept,
    node_filter,
    per_host,
    refused,
    require_rows,
    rows,
    shown,
)

PDSH = "pdsh"
"""What it starts the ranks by, unless `--launcher` says otherwise."""
OWN_WAY = "gangline reaches the hosts in its own way"
ENVIRONMENT_FILE = ".deepspeed_env"
"""Variables for the ranks, NAME=VALUE in a line, in the user's home folder and in the current one."""


def _include(wishes: Wishes, option: str, value: str) -> None:
    wishes.place(included=node_filter(wishes, option, value))
    wishes.notes.append(f"{shown(option, value)}: only there")


def _exclude(wishes: Wishes, option: str, value: str) -> None:
    wishes.place(excluded=node_filter(wishes, option, value))
    wishes.notes.append(f"{shown(option, value)}: not there")


def _num_hosts(wishes: Wishes, option: str, value: str) -> None:
    number = wishes.count(option, value)
    wishes.place(num_hosts=number)
    where = "the first host" if number == 1 else f"the first {number} hosts"
    wishes.notes.append(f"{shown(option, value)}: on {where} of the cluster file")


def _finish(wishes: Wishes) -> None:
    given = wishes.given
    if {"include", "exclude"} <= given.keys():
        raise wishes.refuse("--include with --exclude", "DeepSpeed takes one of the two", "leave one of them out")
    if {"num_nodes", "num_accelerators"} & given.keys() and {"include", "exclude"} & given.keys():
        raise wishes.refuse(
            "--num_nodes or --num_gpus with --include or --exclude", "DeepSpeed refuses both", "leave one out"
        )
    if "launcher_args" in given:
        _launcher_words(wishes, given["launcher_args"], launcher=given.get("launcher", PDSH).lower())
    if "no_local_rank" not in given:
        given["local_rank_flag"] = "--local_rank"
    home = wishes.variables.get("HOME")
    for folder in (*([Path(home)] if home else []), wishes.folder):
        _read_environment(wishes, folder / ENVIRONMENT_FILE)


def _launcher_words(wishes: Wishes, words: str, *, launcher: str) -> None:
    """Words for pdsh say how hosts are reached; those for an MPI or srun may hold variables and places of ranks."""
    option = f"--launcher_args {words}"
    if launcher != PDSH:
        raise wishes.refuse(
            option,
            f"it is for {launcher}, which gangline does not start",
            "leave it out; variables stand in front of the command: NAME=VALUE deepspeed ...",
        )
    wishes.notes.append(f"{option}: dropped; {OWN_WAY}")


def _read_environment(wishes: Wishes, path: Path) -> None:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, has_value, value = line.strip().partition("=")
        if has_value:
            wishes.export(name, value)
    wishes.notes.append(f"{path}: its variables are set")


DEEPSPEED = require_rows(
    OptionTable(
        rows=(
            *rows("-i|--include=", _include),
            *rows("-e|--exclude=", _exclude),
            *rows("--num_nodes=", _num_hosts),
            *per_host("--num_gpus|--num_accelerators="),
            *kept("--module --no_python --no_local_rank"),
            *dropped(IN_CLUSTER_FILE, "-H|--hostfile= --node_rank= --force_multi"),
            *dropped(MEETING, "--master_port= --master_addr="),
            *dropped(OWN_WAY, "--launcher= --no_ssh --no_ssh_check --ssh_port="),
            *dropped(OUTPUT, "--enable_each_rank_log= --log_level= -q|--quiet --save_pid"),
            *kept("--launcher_args="),
            *refused("gangline runs one training", "try settings with gangline sweep", "--autotuning="),
            *refused("gangline binds no rank to cores", "leave it out", "--bind_cores_to_rank --bind_core_list="),
            *refused(
                "gangline activates no environment on the hosts",
                "name its Python in the cluster file: `environment: {python: /path/bin/python}`",
                "--venv_script=",
            ),
        ),
        runs_python=True,
        finish=_finish,
    )
)

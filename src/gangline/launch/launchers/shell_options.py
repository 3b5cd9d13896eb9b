"""Programs that start a command on other hosts or on a cluster of their own: pdsh, clush, pssh, ray, horovodrun."""

from __future__ import annotations

import json
from pathlib import Path

from gangline.launch.launchers.taking_off import (
    IN_CLUSTER_FILE,
    MEETING,
    OUTPUT,
    OptionTable,
    Wishes,
    dropped,
    kept,
    per_host,
    refused,
    require_rows,
    rows,
    shown,
)

CONNECTING = "gangline reaches the hosts in its own way"

PDSH = require_rows(
    OptionTable(
        is_shell=True,
        rows=(
            *dropped(IN_CLUSTER_FILE, "-w= -x= -g= -X= -F= -a -A -i"),
            *dropped(CONNECTING, "-R= -M= -l= -t= -f= -b -S -d"),
            *dropped(OUTPUT, "-N"),
            *refused("gangline has no time limit", "gangline stop RUN ends the run", "-u="),
        ),
    )
)
CLUSH = require_rows(
    OptionTable(
        is_shell=True,
        rows=(
            *dropped(IN_CLUSTER_FILE, "-w= -x= -g|--group= -X= -a|--all --hostfile|--machinefile= --topology= --pick="),
            *dropped(
                CONNECTING,
                "-l|--user= -f|--fanout= -t|--connect_timeout= -o|--options= -R|--worker= --conf= -O|--option=",
            ),
            *dropped(
                OUTPUT,
                "-b|--dshbak -B -L -N -S|--maxrc -q|--quiet -v|--verbose -P|--progress -r|--regroup -G|--groupbase "
                "--color= --diff -s|--groupsource= --outdir= --errdir= -n|--nostdin",
            ),
            *refused("gangline has no time limit", "gangline stop RUN ends the run", "-u|--command_timeout="),
        ),
    )
)
PSSH = require_rows(
    OptionTable(
        is_shell=True,
        rows=(
            *dropped(IN_CLUSTER_FILE, "-h|--hosts= -H|--host="),
            *dropped(
                CONNECTING,
                "-l|--user= -p|--par= -O|--option= -x|--extra-args= -X|--extra-arg= -A|--askpass -I|--send-input",
            ),
            *dropped(OUTPUT, "-i|--inline -o|--outdir= -e|--errdir= -v|--verbose -P|--print --inline-stdout"),
            *dropped("gangline has no time limit", "-t|--timeout="),
        ),
    )
)


def _runtime_json(wishes: Wishes, option: str, value: str) -> None:
    try:
        asked = json.loads(value)
        variables = {str(name): str(text) for name, text in asked.get("env_vars", {}).items()}
    except (ValueError, AttributeError) as error:
        raise wishes.refuse(option, f"no JSON object: {error}", "write it as Ray takes it") from error
    others = sorted(set(asked) - {"env_vars"})
    if others:
        raise wishes.refuse(
            f"{option} with {', '.join(others)}",
            "gangline sets its env_vars only",
            "the environment of the ranks stands in the cluster file, and --dir names their folder",
        )
    for name, text in variables.items():
        wishes.export(name, text)


def _working_dir(wishes: Wishes, option: str, value: str) -> None:
    if (wishes.folder / value).resolve() != Path(wishes.folder).resolve():
        raise wishes.refuse(
            shown(option, value),
            f"the folder that is copied is {wishes.folder}",
            f"gangline run --dir {value} -- ...",
        )


RAY = require_rows(
    OptionTable(
        rows=(
            *rows("--runtime-env-json=", _runtime_json),
            *rows("--working-dir=", _working_dir),
            *dropped(IN_CLUSTER_FILE, "--address="),
            *dropped(
                "runs have ids of gangline",
                "--submission-id|--job-id= --no-wait --metadata-json= --log-style= --log-color= -v|--verbose",
            ),
            *dropped(
                "it is about one process that asks Ray for more; here every rank runs the program",
                "--entrypoint-num-cpus= --entrypoint-num-gpus= --entrypoint-memory= --entrypoint-resources= "
                "--entrypoint-label-selector=",
            ),
            *dropped(CONNECTING, "--verify= --headers="),
            *refused(
                "gangline reads no file of Ray", "write its variables in front: NAME=VALUE ray ...", "--runtime-env="
            ),
        ),
    )
)
HOROVODRUN = require_rows(
    OptionTable(
        rows=(
            *dropped("the cluster file says how many slots a host has", "-np|--num-proc="),
            *dropped(IN_CLUSTER_FILE, "-H|--hosts= --hostfile= --network-interface= --network-interfaces="),
            *dropped(
                CONNECTING,
                "-p|--ssh-port= -i|--ssh-identity-file= --start-timeout= --disable-cache --gloo --mpi --jsrun "
                "--mpi-args= --tcp",
            ),
            *dropped(OUTPUT, "--verbose --output-filename= -v|--version --prefix-output-with-timestamp"),
            *refused(
                "it tunes Horovod, whose ranks gangline does not start",
                "leave it out",
                "--config-file= --fusion-threshold-mb= --cycle-time-ms= --autotune "
                "--timeline-filename= --min-np= --max-np= "
                "--host-discovery-script=",
            ),
        ),
    )
)
COLOSSALAI = require_rows(
    OptionTable(
        runs_python=True,
        rows=(
            *per_host("--nproc_per_node="),
            *kept("-m"),
            *dropped(IN_CLUSTER_FILE, "--hostfile= -H|--host= --num_nodes="),
            *dropped(MEETING, "--master_addr= --master_port="),
            *dropped(CONNECTING, "--ssh-port="),
            *refused("gangline reads neither", "write the hosts into the cluster file", "--include= --exclude="),
            *refused("gangline starts torchrun itself", "leave it out", "--extra_launch_args="),
        ),
    )
)

"""srun: its options, in versions 22 to 24 of Slurm."""

from __future__ import annotations

from gangline.launch.launchers.taking_off import (
    OUTPUT,
    OptionTable,
    Wishes,
    dropped,
    per_host,
    refused,
    require_rows,
    rows,
)

ALLOCATION = "the allocation stands in the cluster file (`slurm`)"
BINDING = "gangline binds no rank to cores or cards"


def _export(wishes: Wishes, _option: str, value: str) -> None:
    """--export=ALL,NAME,NAME=VALUE."""
    for part in value.split(","):
        if part not in {"ALL", "NONE", "NIL"}:
            name, has_value, text = part.partition("=")
            wishes.export(name, text if has_value else None)


SRUN = require_rows(
    OptionTable(
        rows=(
            *rows("--export=", _export),
            *per_host("--ntasks-per-node="),
            *dropped(
                "the cluster file says how many slots a host has",
                "-n|--ntasks= --ntasks-per-gpu= --ntasks-per-core= --ntasks-per-socket=",
            ),
            *dropped(
                ALLOCATION,
                "-A|--account= --acctg-freq= --bb= --bbf= -b|--begin= --comment= -C|--constraint= "
                "--cluster-constraint= -M|--clusters= --contiguous -S|--core-spec= "
                "--cores-per-socket= -c|--cpus-per-task= "
                "--cpus-per-gpu= --deadline= --delay-boot= -d|--dependency= -x|--exclude= --exclusive? --exact "
                "-B|--extra-node-info= --gpu-freq= -G|--gpus= --gpus-per-node= --gpus-per-socket= --gpus-per-task= "
                "--gres= --gres-flags= -H|--hold -I|--immediate? --jobid= -J|--job-name= -L|--licenses= --mail-type= "
                "--mail-user= --mcs-label= --mem= --mem-per-cpu= --mem-per-gpu= --mincpus= --network= --nice? "
                "-w|--nodelist= -F|--nodefile= -N|--nodes= -O|--overcommit --overlap "
                "-s|--oversubscribe -p|--partition= "
                "--power= --prefer= --priority= -q|--qos= --reboot -r|--relative= --reservation= --resv-ports? "
                "--sockets-per-node= --spread-job --switches= --thread-spec= --threads-per-core= "
                "-t|--time= --time-min= "
                "--tmp= --tres-per-task= --use-min-nodes --wckey= -Z|--no-allocate --whole",
            ),
            *dropped(
                BINDING,
                "--cpu-bind= --mem-bind= --gpu-bind= --accel-bind= -m|--distribution= --hint= --cpu-freq= --tres-bind=",
            ),
            *dropped(
                OUTPUT,
                "-l|--label -u|--unbuffered -o|--output= -e|--error= -i|--input= --open-mode= "
                "-v|--verbose -Q|--quiet "
                "--slurmd-debug= --profile= -X|--disable-status --quit-on-interrupt --debugger-test",
            ),
            *dropped(
                "gangline starts and ends the ranks",
                "-K|--kill-on-bad-exit? -k|--no-kill? -W|--wait= -T|--threads= --mpi= --signal= --propagate? "
                "-E|--preserve-env --send-libs? --compress? --bcast-exclude= --x11? --stepmgr",
            ),
            *refused("gangline copies the folder of --dir", "gangline run --dir FOLDER", "-D|--chdir= --bcast?"),
            *refused("one program runs on all ranks", "name it behind gangline run --", "--multi-prog --het-group="),
            *refused(
                "gangline starts nothing besides the ranks",
                "leave it out",
                "--prolog= --epilog= --task-prolog= --task-epilog= --pty?",
            ),
            *refused(
                "the environment of ranks stands in the cluster file",
                "write `environment: {apptainer: IMAGE}` there",
                "--container= --container-id= --container-image= --container-mounts= "
                "--container-workdir= --container-name= "
                "--container-save= --container-mount-home --no-container-mount-home --container-remap-root "
                "--no-container-remap-root --container-entrypoint --no-container-entrypoint --container-writable "
                "--container-readonly --container-env=",
            ),
        ),
    )
)

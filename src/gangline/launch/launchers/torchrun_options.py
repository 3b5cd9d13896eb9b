"""torchrun and torch.distributed.launch: their options (`torch.distributed.run.get_args_parser`)."""

from __future__ import annotations

from gangline.launch.launchers.taking_off import (
    IN_CLUSTER_FILE,
    MEETING,
    OUTPUT,
    OptionTable,
    Wishes,
    dropped,
    kept,
    refused,
    require_rows,
    rows,
    shown,
)

SLOTS = ("auto", "gpu", "cpu", "xpu")
"""Words for the number of ranks: as many as the host has devices."""


def _ranks(wishes: Wishes, option: str, value: str) -> None:
    if value in SLOTS:
        wishes.notes.append(f"{shown(option, value)}: as many ranks as the cluster file has slots")
        return
    number = wishes.count(option, value)
    wishes.place(ranks_per_host=number)
    wishes.notes.append(f"{shown(option, value)}: {number} rank{'s' if number > 1 else ''} on every host")


def _restarts(wishes: Wishes, option: str, value: str) -> None:
    if value != "0":
        wishes.restarts = wishes.count(option, value)
        wishes.notes.append(f"{shown(option, value)}: as --restarts {value}")


ROWS = (
    *rows("--nproc-per-node=", _ranks),
    *rows("--max-restarts=", _restarts),
    *kept("-m|--module --no-python"),
    *dropped(IN_CLUSTER_FILE, "--nnodes= --node-rank="),
    *dropped(
        MEETING,
        "--rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf= --standalone --master-addr= --master-port= "
        "--local-addr=",
    ),
    *dropped(
        OUTPUT,
        "--log-dir= -r|--redirects= -t|--tee= --local-ranks-filter= --duplicate-stdout-filters= "
        "--duplicate-stderr-filters= --event-log-handler=",
    ),
    *dropped(
        "gangline watches the ranks and ends them", "--monitor-interval= --shutdown-timeout= --signals-to-handle="
    ),
    *dropped("it makes no difference to a program", "--start-method= --role="),
    *refused("the script would run inside of torchrun", "leave it out", "--run-path"),
    *refused("ranks are numbered 0, 1, ... on every host", "leave it out", "--virtual-local-rank"),
    *refused(
        "gangline binds no rank to cores",
        "leave it out, or write numactl in front of the program",
        "--numa-binding=",
    ),
    *refused("ranks write their logs where gangline looks for them", "leave it out", "--logs-specs="),
)
TORCHRUN = require_rows(OptionTable(rows=ROWS, runs_python=True))


def _local_rank(wishes: Wishes) -> None:
    """The older launcher tells a script its local rank by an option, unless it is told not to."""
    if "use_env" not in wishes.given:
        wishes.given["local_rank_flag"] = "--local-rank"


TORCH_LAUNCH = require_rows(
    OptionTable(rows=(*ROWS, *kept("--use-env")), runs_python=True, finish=_local_rank),
)
"""torch.distributed.launch."""

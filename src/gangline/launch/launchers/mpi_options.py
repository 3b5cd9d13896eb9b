"""mpirun and mpiexec of OpenMPI (4 and 5), of MPICH and of Intel MPI (hydra): their options.

MPI itself is not started: the ranks meet by torch.distributed, and find the variables that MPI would set.
"""

from __future__ import annotations

import re

from gangline.launch.launchers.taking_off import (
    IN_CLUSTER_FILE,
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

PER_HOST = re.compile(r"ppr:(\d+):node(:.*)?")
OF_MPI = "it is about MPI, which is not started"
BINDING = "gangline binds no rank to cores"
COUNT = "the cluster file says how many slots a host has"


def _export(wishes: Wishes, _option: str, value: str) -> None:
    """OpenMPI: -x NAME, -x NAME=VALUE."""
    name, has_value, text = value.partition("=")
    wishes.export(name, text if has_value else None)


def _set(wishes: Wishes, _option: str, value: str) -> None:
    """hydra: -genv NAME VALUE."""
    name, _, text = value.partition(" ")
    wishes.export(name, text)


def _list(wishes: Wishes, _option: str, value: str) -> None:
    """hydra: -genvlist NAME,NAME."""
    for name in value.split(","):
        wishes.export(name, None)


def _map_by(wishes: Wishes, option: str, value: str) -> None:
    found = PER_HOST.fullmatch(value)
    if found is None:
        wishes.notes.append(f"{shown(option, value)}: dropped; {BINDING}")
        return
    number = wishes.count(option, found[1])
    wishes.place(ranks_per_host=number)
    wishes.notes.append(f"{shown(option, value)}: {number} rank{'s' if number > 1 else ''} on every host")


def _one(wishes: Wishes, option: str, _value: str) -> None:
    wishes.place(ranks_per_host=1)
    wishes.notes.append(f"{option}: 1 rank on every host")


MPI = require_rows(
    OptionTable(
        rows=(
            *rows("-x=", _export),
            *rows("-genv== -env==", _set),
            *rows("-genvlist= -envlist=", _list),
            *rows("--map-by=", _map_by),
            *rows("--pernode", _one),
            *per_host("-N|--npernode|--ppn|--perhost="),
            *dropped(COUNT, "-c|-n|--n|--np="),
            *dropped(
                IN_CLUSTER_FILE,
                "-H|--host= --hosts= -f|--hostfile|--machinefile|--machine= --default-hostfile= --nolocal "
                "--do-not-resolve --localhost=",
            ),
            *dropped(
                BINDING,
                "--bind-to= --bind-to-core --bind-to-socket --bycore --bynode --byslot --cpu-list= --cpu-set= "
                "--cpus-per-proc= --cpus-per-rank= --rank-by= -rf|--rankfile= --npersocket= --ppr= "
                "--use-hwthread-cpus "
                "--binding= --order-nodes= --rr --grr=",
            ),
            *dropped("slots of a host are the ranks that run there", "--oversubscribe --nooversubscribe"),
            *dropped(
                OF_MPI,
                "--mca== --gmca== --pmca== --prtemca== --am= --tune= --prefix= --noprefix --cf|--cartofile= --dvm "
                "--hnp= --launch-agent= --leave-session-attached --max-vm-size= --novm --ompi-server= "
                "--personality= --pmixmca== --fwd-mpirun-port --use-regexp --enable-instant-on-support --path= "
                "--launcher|--bootstrap= --launcher-exec|--bootstrap-exec= --rmk= --iface= --demux= --pmi-port "
                "--ranks-per-proc= --hydra-bstrap-keep-fds --topolib= --nameserver= --usize= --pmi-connect= "
                "--pmi-aggregate --pmi-noaggregate --pmi-args= --tmpdir= --branch-count= --skip-launch-node",
            ),
            *dropped(
                "gangline runs as you, and asks nothing of root",
                "--allow-run-as-root --genvall --genvnone --envall --envnone --enable-x --disable-x "
                "--disable-hostname-propagation --localonly",
            ),
            *dropped(
                OUTPUT,
                "--tag-output --timestamp-output --output-filename= --output= --merge-stderr-to-stdout "
                "--report-bindings --display= --display-map --display-allocation --display-devel-allocation "
                "--display-devel-map --display-diffable-map --display-topo --show-progress -q|--quiet -v|--verbose "
                "--report-child-jobs-separately --report-events= --report-pid= --report-uri= "
                "--report-state-on-timeout --output-proctable --xml --xml-file= -d|--debug-devel --debug-daemons "
                "--debug-daemons-file --get-stack-traces -l|--prepend-rank --prepend-pattern= --outfile-pattern= "
                "--errfile-pattern= --print-all-exitcodes --print-rank-map --info --profile --stdin= "
                "--stream-buffering=",
            ),
            *dropped(
                "gangline ends all ranks after a failure",
                "--disable-recovery --disable-auto-cleanup --enable-auto-cleanup --continuous",
            ),
            *refused(
                "MPI would start a dead rank again", "gangline run --restarts N", "--max-restarts= --enable-recovery"
            ),
            *refused("the run has a folder of its own on every host", "gangline run --dir FOLDER", "-wd|--wdir="),
            *refused("gangline has no time limit", "gangline stop RUN ends the run", "--timeout="),
            *refused(
                "gangline copies the folder of --dir", "put the files into it", "-s|--preload-binary --preload-files="
            ),
            *refused(
                "its programs stand in a file",
                "name one program for all ranks behind gangline run --",
                "--app= --configfile=",
            ),
            *refused(
                "it starts a debugger or an instrument",
                "leave it out",
                "--debug --debugger= --tv --xterm= --gtool= --gtoolfile= --check-mpi --trace? --gdb "
                "--gdba= --do-not-launch",
            ),
            *refused(
                "it gives ranks another place",
                "leave it out",
                "--set-cwd-to-session-dir --index-argv-by-rank --umask= --gpath= --gwdir= --ckpoint-interval= "
                "--ckpoint-prefix= --ckpoint-num= --ckpointlib=",
            ),
            *kept("-V|--version"),
        )
    )
)

"""The configuration of a Slurm cluster in a lab: short times, so that a test need not wait for long ones."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.namespaces import PATH

TIMED_OUT = "Unable to contact slurm controller (connect failure): Socket timed out on send/recv operation"
PARTITIONS = (
    "main MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
    "urgent MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
)
SETTINGS = {
    "ClusterName": "lab",
    "SlurmctldHost": "ctl",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    # How long a requeued job waits, and a credential lives: 120 s by default.
    "AuthInfo": "cred_expire=5",
    "MpiDefault": "none",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "GresTypes": "gpu",
    "SlurmdParameters": "config_overrides",
    "SchedulerParameters": "sched_interval=1,bf_interval=3,batch_sched_delay=0,sched_min_interval=0",
    "ReturnToService": 2,
    "SlurmctldTimeout": 30,
    "SlurmdTimeout": 10,
    "BatchStartTimeout": 10,
    "KillWait": 5,
    "OverTimeLimit": 0,
    "InactiveLimit": 0,
    "MinJobAge": 300,
    "MessageTimeout": 10,
    "MaxArraySize": 1001,
    "JobRequeue": 1,
    "StateSaveLocation": "/var/spool/slurmctld",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": "/var/log/slurmctld.log",
    "SlurmdLogFile": "/var/log/slurmd.log",
}
ACCOUNTED = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": "ctl",
    "AccountingStorageEnforce": "associations,limits,qos",
    "AccountingStorageTRES": "gres/gpu",
    "JobAcctGatherType": "jobacct_gather/linux",
}
SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=ctl
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurmdbd.log
"""
ACCOUNTS = """
set -e
sacctmgr --immediate --quiet add cluster lab
sacctmgr --immediate --quiet add qos short MaxWall=00:10:00 MaxTRESPerUser=node=1
sacctmgr --immediate --quiet add account physics Description=physics Organization=lab
sacctmgr --immediate --quiet add user root account=physics
sacctmgr --immediate --quiet modify user root set qos+=short DefaultAccount=physics
"""
"""Who may use the cluster: root, in the account physics, with the QOS normal and short."""
DAEMONS = ("slurmd", "/usr/sbin/slurmd", "munged", "/usr/sbin/munged")

SET_UP = """
set -e
chown -R munge /etc/munge
chmod 700 /etc/munge
chmod 400 /etc/munge/munge.key
mkdir -p /run/munge /var/log/munge /var/lib/munge /var/spool/slurmctld /var/spool/slurmd "$1"
chown munge /run/munge /var/log/munge /var/lib/munge
mountpoint -q /sys/fs/cgroup || mount -t tmpfs -o size=1m cgroup /sys/fs/cgroup
number=0
while [ "$number" -lt "$2" ]; do
    mknod -m 666 "/dev/nvidia$number" c 195 "$number"
    number=$((number + 1))
done
runuser -u munge -- munged
"""
ACCOUNTING = """
set -e
mkdir -p /run/mysqld /var/lib/lab-mysql
mariadb-install-db --no-defaults --user=root --datadir=/var/lib/lab-mysql --auth-root-authentication-method=socket \
    --skip-test-db >/dev/null
mariadbd --no-defaults --user=root --datadir=/var/lib/lab-mysql --skip-networking --socket=/run/mysqld/mysqld.sock \
    --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 \
    </dev/null >/var/log/mariadbd.log 2>&1 &
until mariadb --no-defaults --socket=/run/mysqld/mysqld.sock -e 'select 1' >/dev/null 2>&1; do sleep 0.1; done
slurmdbd
until sacctmgr --noheader list cluster >/dev/null 2>&1; do sleep 0.1; done
"""
FILES = (
    "find /var/spool/slurmd /tmp /dev/shm -mindepth 1 "
    r"! -name cred_state\* ! -name hwloc_topo\* ! -name torchinductor_root "
    r"! \( -name gangline-lease.port-\* -exec grep -q until {} \; \)"
)
"""Lists files that jobs left on a node, but for an empty folder of torch, and for a port that a start has looked for.

A start that ends before its ranks run leaves the latter; it counts for two minutes, and the next claim deletes it.
"""


def slurm_conf(
    names: Sequence[str],
    *,
    gpus: Mapping[str, int],
    gpu_type: str,
    cpus: int,
    partitions: Sequence[str],
    accounting: bool,
    settings: Mapping[str, object],
) -> str:
    """The text of slurm.conf."""
    values = {**SETTINGS, **(ACCOUNTED if accounting else {}), **settings}
    lines = [f"{name}={value}" for name, value in values.items()]
    for name in names:
        gres = f" Gres=gpu:{gpu_type}:{gpus[name]}" if gpus[name] else ""
        lines.append(f"NodeName={name} CPUs={cpus} RealMemory=4000 State=UNKNOWN{gres}")
    for number, words in enumerate(partitions):
        more = "" if " Nodes=" in words else f" Nodes={','.join(names)}"
        lines.append(f"PartitionName={words}{more} State=UP Default={'NO' if number else 'YES'}")
    return "\n".join(lines) + "\n"


def gres_conf(gpus: Mapping[str, int], gpu_type: str) -> str:
    """The text of gres.conf: device files that the nodes have, and what they are called."""
    lines = []
    for name, count in gpus.items():
        if count:
            files = "/dev/nvidia0" if count == 1 else f"/dev/nvidia[0-{count - 1}]"
            lines.append(f"NodeName={name} Name=gpu Type={gpu_type} File={files}")
    return "\n".join(lines) + "\n"


def user_env(home: Path) -> dict[str, str]:
    """The environment of a user's commands on every host."""
    return {"PATH": f"{Path(sys.prefix) / 'bin'}:{PATH}", "GANGLINE_HOME": f"{home}/.gangline", "OMP_NUM_THREADS": "1"}


def is_daemon(words: str) -> bool:
    """Whether a command line is one of Slurm's daemons on a node."""
    return words.split(maxsplit=1)[0] in DAEMONS

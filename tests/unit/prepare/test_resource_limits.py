"""Step `limits`: a drop-in of pam_limits, and the size of /dev/shm. Facts in, changes out."""

import dataclasses

from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.prepare.resource_limits import DROP_IN, FSTAB, LIMITS, MOUNTED, PROC_LIMITS
from gangline.runs.cluster import Cluster, Host

HOST = Host(name="pc1", workdir="/w", python="", transport="ssh")
PROC = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              8388608              bytes
Max open files            {soft}                 {hard}              files
"""
MOUNTS = "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=65536k 0 0\n"


def reading(*, soft=1024, hard=1048576, shm="524288 4096", rdma=(), fstab="", drop_in=None, mounts=MOUNTS):
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={
            DROP_IN: FileRead(content=drop_in),
            FSTAB: FileRead(content=fstab.encode()),
            PROC_LIMITS: FileRead(content=PROC.format(soft=soft, hard=hard).encode()),
            MOUNTED: FileRead(content=mounts.encode()),
        },
        folders={"/etc/security/limits.d": (), "/sys/class/infiniband": rdma or None},
        commands={"shm": shm},
        programs={},
    )


def planned(found):
    cluster = Cluster(name="home", hosts=(HOST,))
    return LIMITS.plan(StepView(host=HOST, cluster=cluster, reading=found, readings={"pc1": found}))


def drop_in(plan):
    return next(each.content.decode() for each in plan.changes if isinstance(each, FileChange) and each.path == DROP_IN)


def test_more_files_may_be_open_and_a_second_look_finds_nothing_to_change():
    plan = planned(reading())
    assert drop_in(plan) == "# gangline prepare limits\nalice soft nofile 65536\n"
    assert "1024 files" in plan.reason
    again = planned(reading(drop_in=drop_in(plan).encode()))
    assert again.changes == ()
    assert "log in anew" in again.remains[0]


def test_a_low_hard_limit_is_raised_too():
    assert "alice hard nofile 65536\n" in drop_in(planned(reading(hard=4096)))


def test_locked_memory_matters_where_there_is_rdma():
    assert "memlock" not in drop_in(planned(reading()))
    assert "alice soft memlock unlimited\nalice hard memlock unlimited\n" in drop_in(planned(reading(rdma=("mlx5_0",))))


def test_lines_of_others_in_the_drop_in_stay():
    assert drop_in(planned(reading(drop_in=b"bob soft nofile 4096\n"))).startswith("bob soft nofile 4096\nalice")


def test_enough_of_everything_needs_nothing():
    assert planned(reading(soft=65536)).changes == ()


def test_a_container_without_pam_limits_is_left_to_its_owner():
    found = dataclasses.replace(reading(), folders={"/etc/security/limits.d": None, "/sys/class/infiniband": None})
    plan = planned(found)
    assert plan.changes == ()
    assert "limits of the container" in plan.remains[0]


def test_a_small_shared_memory_becomes_half_of_the_memory():
    plan = planned(
        reading(soft=65536, shm="16384 4096", fstab="tmpfs /dev/shm tmpfs rw,size=64m 0 0\n/dev/sda1 / ext4\n")
    )
    fstab, command = plan.changes
    assert fstab.content == b"tmpfs /dev/shm tmpfs rw,size=50% 0 0\n/dev/sda1 / ext4\n"
    assert isinstance(command, CommandChange)
    assert command.argv == ("mount", "-o", "remount,size=50%", "/dev/shm")
    assert command.undo == ("mount", "-o", "remount,size=67108864", "/dev/shm")
    assert "64 MiB" in plan.reason


def test_shared_memory_of_a_container_cannot_be_changed_from_inside():
    plan = planned(reading(soft=65536, shm="16384 4096", mounts="overlay / overlay rw 0 0\n"))
    assert plan.changes == ()
    assert "--shm-size" in plan.remains[0]

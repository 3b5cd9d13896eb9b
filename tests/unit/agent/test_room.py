"""A full disk and a file server that does not answer are seen, and neither keeps anybody waiting."""

import os
import threading

import pytest

from gangline.agent.supervise import room
from gangline.agent.supervise.room import ANSWER_S, EVERY_S, Mount, RoomWatch

DISK, NAS = Mount("/", "ext4", "/dev/sda1"), Mount("/mnt/nas", "nfs4", "nas:/export")
SHM = Mount("/dev/shm", "tmpfs", "tmpfs")


def statistics(*, free=10**6, files=10**6, blocks=10**6):
    values = [4096, 4096, blocks, free, free, 10**6, files, files, 0, 255]
    return os.statvfs_result(values)


class Disks:
    """File systems that answer as they are told; None: not at all."""

    def __init__(self, monkeypatch, *folders, **answers):
        monkeypatch.setattr(room, "mounts", lambda: [DISK, SHM, NAS])
        self.now = 50.0
        self.answers = {"/srv": statistics(), "/dev/shm": statistics(), "/mnt/nas": statistics(), **answers}
        self.end = threading.Event()
        self.watch = RoomWatch(folders or ("/srv",), statistics=self.ask, clock=lambda: self.now)

    def ask(self, folder):
        if self.answers[folder] is None:
            self.end.wait(20)
        return self.answers[folder]

    def words(self, seconds=0.0):
        self.now += seconds
        self.watch.look()
        for look in self.watch._looks.values():
            look.wait(5.0 if self.answers[look._folder] else 0.0)
        self.watch.look()
        return [each.words for each in self.watch.troubles]


@pytest.fixture
def disks(monkeypatch):
    made = []

    def make(*folders):
        made.append(Disks(monkeypatch, *folders))
        return made[-1]

    yield make
    for each in made:
        each.end.set()


def test_a_disk_with_room_is_no_trouble(disks):
    assert disks("/srv", "/dev/shm", "/mnt/nas").words() == []


def test_a_full_disk_is_named_until_it_has_room_again(disks):
    each = disks()
    each.answers["/srv"] = statistics(free=10)
    assert each.words() == ["the disk at / is full: 40 KiB of 3.81 GiB are free"]
    assert each.words(1.0) == ["the disk at / is full: 40 KiB of 3.81 GiB are free"]
    each.answers["/srv"] = statistics()
    assert each.words(EVERY_S) == []


def test_shared_memory_and_inodes_are_named_as_such(disks):
    each = disks("/dev/shm", "/srv")
    each.answers["/dev/shm"], each.answers["/srv"] = statistics(free=0), statistics(files=0)
    assert each.words() == [
        "/dev/shm is full: 0 B of 3.81 GiB are free",
        "the disk at / takes no more files: all its inodes are used",
    ]


def test_a_file_system_without_a_size_is_not_full(disks):
    each = disks()
    each.answers["/srv"] = statistics(blocks=0, free=0)
    assert each.words() == []


def test_a_file_server_that_does_not_answer_is_named_and_the_others_are_looked_at(disks):
    each = disks("/mnt/nas", "/srv")
    each.answers["/mnt/nas"], each.answers["/srv"] = None, statistics(free=0)
    full = "the disk at / is full: 0 B of 3.81 GiB are free"
    assert each.words() == [full]
    assert each.words(ANSWER_S) == ["the file server of /mnt/nas (nas:/export) does not answer", full]
    each.answers["/mnt/nas"] = statistics()
    each.end.set()
    assert each.words() == [full]


def test_the_folders_are_those_of_the_part_and_those_of_servers_that_it_speaks_of(tmp_path):
    among = [DISK, SHM, NAS, Mount("/mnt/other", "nfs4", "nas:/other")]
    run = tmp_path / "runs" / "calm-otter-7"
    (run / "attempts" / "1").mkdir(parents=True)
    (run / "job.json").write_text('{"model": {"path": "/mnt/nas/llama"}}')
    request = {"folder": "/srv/x", "rank_files": str(run / "attempts" / "1"), "argv": ["python"], "env": {"A": "/mnt"}}
    assert room.folders_of(request, among) == ["/mnt/nas", "/dev/shm", "/srv/x"]
    assert room.folders_of({**request, "env": {"HF_HOME": "/mnt/other/hub"}}, among)[1] == "/mnt/other"
    assert room.folders_of(request, [DISK]) == ["/srv/x"]


def test_the_file_system_of_a_path_is_the_innermost_one():
    among = [DISK, NAS, Mount("/mnt", "ext4", "/dev/sdb1")]
    assert room.mount_of("/mnt/nas/a", among) == NAS
    assert room.mount_of("/mnt/nash", among).source == "/dev/sdb1"
    assert room.mount_of("/srv", among) == DISK


def test_the_verb_answers_for_this_computer(tmp_path):
    said = room.room({"request": {"folder": str(tmp_path), "rank_files": str(tmp_path), "argv": [], "env": {}}})
    assert isinstance(said["troubles"], list)

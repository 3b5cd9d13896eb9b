"""Users of one machine see each other's leases, and none can end, fake or block what is another's. With real users."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gangline.agent import machine_leases
from gangline.agent.machine_leases import publish, sweep, withdraw

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="takes root, to be several users")

GPUS = {"0000:01:00.0": "GPU-aaaa", "0000:41:00.0": "GPU-bbbb"}
ANNA, BEN, MALLORY = 23001, 23002, 23003
USER = """
import codecs, json, os, signal, subprocess, sys, time, fcntl
from pathlib import Path
from gangline.agent import machine_leases
from gangline.agent.netprobe import free_ports
from gangline.agent.supervise import leases, processes
from gangline.agent.supervise.host_agent import reap
from gangline.agent.verbs import VerbFailed
place, uid = sys.argv[1], int(sys.argv[2])
codecs.lookup("ascii"), codecs.lookup("idna"), subprocess.run(["true"])  # what is imported late is below a folder of root's
os.umask(0o077)
os.setgroups([]), os.setgid(uid), os.setuid(uid)
home = f"{place}/{uid}"
os.environ["XDG_STATE_HOME"] = home
machine_leases.PLACES = (f"{place}/lock", f"{place}/shm")
leases.DRIVER = Path(place, "driver")
leases.DEVICES = Path(place, "dev")
os.cpu_count = lambda: 2

def request(run, *, devices=(), num_ranks=1, slots=1, attempt=1):
    part = {"run_id": run, "attempt": attempt, "host": "pc1", "folder": f"{home}/{run}", "leases": f"{home}/leases"}
    env = {} if devices else {"CUDA_VISIBLE_DEVICES": ""}
    return {**part, "ranks": list(range(num_ranks)), "slots": slots, "devices": list(devices), "env": env}

def claim(run, **more):
    names["mine"] = leases.Leases()
    names["mine"].claim(request(run, **more))
    return names["mine"].slots

def child(**more):
    return subprocess.Popen(["sleep", "300"], stdin=-3, stdout=-3, **more)

def lock(name, *, mode=0o644, text=""):
    held = os.open(f"{place}/lock/{name}", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(held, text.encode())
    os.fchmod(held, mode)
    fcntl.flock(held, fcntl.LOCK_EX)

names = globals()
for line in sys.stdin:
    try:
        said = {"value": eval(json.loads(line), names)}
    except VerbFailed as failed:
        said = {"refused": failed.record}
    except OSError as error:
        said = {"error": error.strerror}
    print(json.dumps(said, default=str), flush=True)
"""


class User:
    """A process of another user, which does what it is told."""

    def __init__(self, place, uid):
        self.uid = uid
        (place / str(uid)).mkdir(exist_ok=True)
        os.chown(place / str(uid), uid, uid)
        argv = [sys.executable, "-c", USER, str(place), str(uid)]
        self.process = subprocess.Popen(argv, stdin=-1, stdout=-1, text=True, start_new_session=True)

    def tell(self, code):
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def does(self, code):
        self.tell(code)
        return self.hear()

    def gets(self, code):
        said = self.does(code)
        assert "value" in said, said
        return said["value"]

    def is_refused(self, code):
        return self.does(code)["refused"]

    def dies(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def place():
    """Where users meet: the two folders of everybody, and what the driver tells."""
    path = Path(tempfile.mkdtemp(prefix="leases-", dir="/tmp"))
    path.chmod(0o711)
    for name in ("lock", "shm"):
        (path / name).mkdir()
        (path / name).chmod(0o1777)
    for bus, uuid in GPUS.items():
        (path / "driver" / bus).mkdir(parents=True)
        (path / "driver" / bus / "information").write_text(f"GPU UUID: \t {uuid}\n")
    for folder in [path / "driver", *(path / "driver").iterdir()]:
        folder.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def users(place):
    made = []

    def make(*uids):
        made.extend(User(place, uid) for uid in uids)
        return made[-len(uids) :]

    yield make
    for user in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(user.process.pid, signal.SIGKILL)  # with its children
        user.process.communicate()


def leases_in(place):
    return sorted(path.name.split(".")[1] for path in place.glob("*/gangline-lease.*"))


def test_a_gpu_of_another_user_is_refused_by_user_and_run_and_free_at_its_end(users, place):
    anna, ben = users(ANNA, BEN)
    assert anna.gets("claim('calm-otter-7', devices=[1])") == ["gpu-GPU-bbbb"]
    said = ben.is_refused("claim('brave-fox-2', devices=[0, 1], num_ranks=2)")
    assert said["what"] == f"GPU 1 (GPU-bbbb) is in use by user {ANNA}: calm-otter-7"
    assert f"(process {anna.process.pid})" in said["seen"]
    assert said["fix"] == f"wait for it, or ask user {ANNA}: only that user and root can end it"
    assert leases_in(place) == ["gpu-GPU-bbbb"]
    assert ben.gets("claim('brave-fox-2', devices=[0])") == ["gpu-GPU-aaaa"]
    anna.gets("mine.end()")
    assert ben.gets("claim('tame-vole-3', devices=[1])") == ["gpu-GPU-bbbb"]


def test_a_card_that_a_control_group_denies_is_not_counted(users, place):
    """CUDA numbers those that are left from 0. Here the rights of the device file stand for a control group."""
    (place / "dev").mkdir(mode=0o755)
    for minor, (bus, uuid) in enumerate(GPUS.items()):
        text = f"GPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (place / "driver" / bus / "information").write_text(text)
        (place / "dev" / f"nvidia{minor}").touch()
        (place / "dev" / f"nvidia{minor}").chmod(0o666 if minor else 0o600)
    (anna,) = users(ANNA)
    assert anna.gets("claim('calm-otter-7', devices=[0])") == ["gpu-GPU-bbbb"]


def test_a_run_of_the_same_user_is_refused_as_before(users):
    (anna,) = users(ANNA)
    anna.gets("claim('calm-otter-7', devices=[0])")
    assert anna.is_refused("claim('brave-fox-2', devices=[0])")["fix"].endswith("gangline stop calm-otter-7")


def test_a_lease_ends_with_the_last_process_that_inherited_it(users, place):
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    orphan = anna.gets("child(pass_fds=mine.descriptors).pid")
    anna.dies()
    assert "calm-otter-7" in ben.is_refused("claim('brave-fox-2', devices=[0])")["what"]
    os.kill(orphan, signal.SIGKILL)
    wait_for_end(orphan)
    assert ben.gets("claim('brave-fox-2', devices=[0])") == ["gpu-GPU-aaaa"]


def test_a_rank_that_did_not_inherit_the_lock_keeps_the_lease(users):
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    rank = anna.gets("names.update(rank=child()) or rank.pid")
    anna.gets("mine.note([processes.this_process(), processes.find(rank.pid)])")
    anna.dies()
    said = ben.is_refused("claim('brave-fox-2', devices=[0])")
    assert f"(process {rank})" in said["seen"]
    os.kill(rank, signal.SIGKILL)
    wait_for_end(rank)
    ben.gets("claim('brave-fox-2', devices=[0])")


def wait_for_end(pid):
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], 10)[0]
    finally:
        os.close(descriptor)


def test_what_a_killed_holder_left_is_deleted_by_its_next_claim(users, place):
    (anna,) = users(ANNA)
    anna.gets("claim('calm-otter-7', devices=[0, 1], num_ranks=2)")
    anna.dies()
    assert len(leases_in(place)) == 2
    (again,) = users(ANNA)
    again.gets("claim('brave-fox-2', devices=[1])")
    assert leases_in(place) == ["gpu-GPU-bbbb"]


def test_of_two_users_at_the_same_moment_exactly_one_gets_it(users, place):
    both = users(ANNA, BEN)
    for turn in range(15):
        for user in both:
            user.tell(f"claim('calm-otter-{turn}', devices=[0, 1], num_ranks=2)")
        said = [user.hear() for user in both]
        assert sorted(key for each in said for key in each) == ["refused", "value"]
        winner = both[["value" in each for each in said].index(True)]
        winner.gets("mine.end()")
        assert leases_in(place) == []


def test_cpu_slots_of_several_users_count_against_the_cores(users):
    """Of two cores here; a user alone may have as many slots as that user likes."""
    anna, ben = users(ANNA, BEN)
    assert len(anna.gets("claim('calm-otter-7', num_ranks=4, slots=4)")) == 4
    anna.gets("mine.end()")
    anna.gets("claim('calm-otter-7')")
    assert ben.gets("claim('brave-fox-2')") == ["cpu-0"]
    said = ben.is_refused("claim('tame-vole-3', slots=2)")
    assert said["what"] == f"1 CPU slot does not fit beside others: 1 of 2 cores is in use by user {ANNA}: calm-otter-7"


def test_what_is_reserved_for_a_part_is_not_counted_twice(users):
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7')")
    ben.gets("claim('brave-fox-2')")
    assert ben.gets("claim('brave-fox-2')") == ["cpu-0"]


def test_it_says_which_attempt_has_it(users, place):
    (anna,) = users(ANNA)
    anna.gets("claim('calm-otter-7', devices=[0])")
    anna.gets("mine.pass_on(request('calm-otter-7', devices=[0], attempt=2), tag='x')")
    (path,) = (place / "lock").iterdir()
    assert json.loads(path.read_text())["attempt"] == 2
    assert str(place) not in path.read_text()


def test_a_lease_whose_file_was_cleared_away_is_made_anew(users, place):
    """As a service that clears folders of temporary files may do."""
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    (path,) = (place / "lock").iterdir()
    path.unlink()
    anna.gets("mine.note([processes.this_process()])")
    assert "calm-otter-7" in ben.is_refused("claim('brave-fox-2', devices=[0])")["what"]
    anna.gets("mine.end()")
    assert leases_in(place) == []


HARMLESS = {
    "a link": "os.symlink(f'{home}/elsewhere', f'{place}/lock/{name}')",
    "a link to the lease of another user": "os.symlink(f'{place}/lock/x', f'{place}/lock/{name}')",
    "a folder": "os.mkdir(f'{place}/lock/{name}', 0o700)",
    "a pipe": "os.mkfifo(f'{place}/lock/{name}', 0o644) or os.chmod(f'{place}/lock/{name}', 0o644)",
    "an empty file": "Path(place, 'lock', name).touch() or os.chmod(f'{place}/lock/{name}', 0o644)",
    "garbage": "Path(place, 'lock', name).write_text('{[') and os.chmod(f'{place}/lock/{name}', 0o644)",
    "processes that are not there": (
        "Path(place, 'lock', name).write_text('{\"processes\": [[1, 1], [\"a\", 2], 3]}')"
        " and os.chmod(f'{place}/lock/{name}', 0o644)"
    ),
    "a locked file that nobody else may read": "lock(name, mode=0o600)",
    "a locked file that everybody may write": "lock(name, mode=0o666)",
    "a folder of that name, made first": "os.mkdir(f'{place}/lock/gangline', 0o700)",
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_a_hostile_user_puts_there_is_no_lease(users, place, what):
    mallory, anna = users(MALLORY, ANNA)
    mallory.gets("names.update(name='gangline-lease.gpu-GPU-aaaa.0123456789abcdef')")
    mallory.gets(HARMLESS[what])
    assert anna.gets("claim('calm-otter-7', devices=[0])") == ["gpu-GPU-aaaa"]
    anna.gets("mine.end()")
    assert len(list((place / "lock").iterdir())) == 1


@pytest.mark.parametrize("text", ["", "\x1b[31m", "[" * 5000, '{"processes": [[' + "9" * 4000 + ", 1]]}"])
def test_who_locks_a_file_without_a_run_blocks_and_is_named(users, text):
    mallory, anna = users(MALLORY, ANNA)
    mallory.gets(f"lock('gangline-lease.gpu-GPU-aaaa.0123456789abcdef', text={text!r})")
    said = anna.is_refused("claim('calm-otter-7', devices=[0])")
    assert said["what"] == f"GPU 0 (GPU-aaaa) is in use by user {MALLORY}: no run is named"
    assert f"(process {mallory.process.pid})" in said["seen"]


def test_a_name_that_would_steer_a_terminal_is_not_shown(users):
    mallory, anna = users(MALLORY, ANNA)
    record = json.dumps({"run": "\x1b[31mroot: nice", "since": 1e11, "attempt": "x", "processes": [[1, 1]]})
    mallory.gets(f"lock('gangline-lease.gpu-GPU-aaaa.0123456789abcdef', text={record!r})")
    said = anna.is_refused("claim('calm-otter-7', devices=[0])")
    assert "\x1b" not in json.dumps(said)
    assert "no run is named" in said["what"]


def test_who_keeps_the_lock_of_a_run_that_has_ended_is_named(users):
    """And its owner is not held up by it."""
    anna, ben, mallory = users(ANNA, BEN, MALLORY)
    anna.gets("claim('calm-otter-7', devices=[0])")
    mallory.gets("names.update(held=os.open(next(Path(place, 'lock').iterdir()), os.O_RDONLY))")
    anna.dies()
    mallory.gets("fcntl.flock(held, fcntl.LOCK_EX)")
    said = ben.is_refused("claim('brave-fox-2', devices=[0])")
    assert said["seen"].endswith(f"its file is locked by process {mallory.process.pid} of user {MALLORY}")
    (again,) = users(ANNA)
    assert again.gets("claim('tame-vole-3', devices=[0])") == ["gpu-GPU-aaaa"]


def test_one_who_fills_the_folder_hides_nobody_elses_lease(users, monkeypatch):
    mallory, anna, ben = users(MALLORY, ANNA, BEN)
    ben.gets("setattr(machine_leases, 'MOST', 3)")
    for number in range(9):
        mallory.gets(f"Path(place, 'lock', 'gangline-lease.gpu-GPU-aaaa.000000000000000{number}').touch(0o644)")
    anna.gets("claim('calm-otter-7', devices=[0])")
    assert "calm-otter-7" in ben.is_refused("claim('brave-fox-2', devices=[0])")["what"]


def test_nobody_can_delete_or_change_the_lease_of_another(users):
    anna, mallory = users(ANNA, MALLORY)
    anna.gets("claim('calm-otter-7', devices=[0])")
    find = "next(Path(place, 'lock').iterdir())"
    denied = {"Permission denied", "Operation not permitted"}
    for deed in (
        f"{find}.unlink()",
        f"{find}.open('r+')",
        f"{find}.rename({find}.with_name('x'))",
        f"{find}.chmod(0o666)",
    ):
        assert mallory.does(deed).get("error") in denied


def test_a_hard_link_of_a_lease_under_another_name_is_refused_or_no_harm(users, place):
    anna, mallory, ben = users(ANNA, MALLORY, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("this kernel lets everybody make hard links to the files of others")
    link = "os.link(next(Path(place, 'lock').iterdir()), f'{place}/lock/gangline-lease.gpu-GPU-bbbb.0123456789abcdef')"
    assert mallory.does(link)["error"] == "Operation not permitted"
    assert ben.gets("claim('brave-fox-2', devices=[1])") == ["gpu-GPU-bbbb"]


def test_a_rank_of_another_user_is_neither_seen_nor_ended(users):
    """Though it carries the very tag that the other looks for."""
    anna, ben = users(ANNA, BEN)
    part = ben.gets("request('calm-otter-7')")
    rank = anna.gets(f"names.update(rank=child(env={{**os.environ, 'GANGLINE_PART': {part['folder']!r}}})) or rank.pid")
    assert ben.gets(f"[each.pid for each in processes.tagged('GANGLINE_PART={part['folder']}')]") == []
    ben.gets("os.makedirs(request('calm-otter-7')['folder'])")
    assert ben.gets("reap({'request': request('calm-otter-7')})") == {"kind": "result"}
    ben.gets(f"processes.send(processes.find({rank}), signal.SIGKILL)")
    assert anna.gets("rank.poll()") is None


@pytest.mark.parametrize(
    ("mode", "owner", "used"), [(0o1777, 0, "lock"), (0o777, 0, "shm"), (0o1777, MALLORY, "shm"), (0o755, 0, "shm")]
)
def test_only_a_folder_of_roots_that_protects_files_is_used(place, users, mode, owner, used):
    (place / "lock").chmod(mode)
    os.chown(place / "lock", owner, owner)
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    (path,) = place.glob("*/gangline-lease.*")
    assert path.parent.name == used
    ben.is_refused("claim('brave-fox-2', devices=[0])")


def test_without_any_such_folder_leases_are_among_the_runs_of_a_user(place, users):
    for name in ("lock", "shm"):
        (place / name).chmod(0o755)
    anna, ben = users(ANNA, BEN)
    anna.gets("claim('calm-otter-7', devices=[0])")
    ben.gets("claim('brave-fox-2', devices=[0])")
    anna.is_refused("claim('tame-vole-3', devices=[0])")


def test_a_lease_that_finds_no_room_in_the_first_folder_is_seen_in_the_second(place, users):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=1777", "full", str(place / "lock")], check=True)
    try:
        anna, ben = users(ANNA, BEN)
        anna.gets("claim('calm-otter-7', devices=[0])")
        assert [path.parent.name for path in place.glob("*/gangline-lease.*")] == ["shm"]
        subprocess.run(["mount", "-o", "remount,rw", str(place / "lock")], check=True)
        assert "calm-otter-7" in ben.is_refused("claim('brave-fox-2', devices=[0])")["what"]
    finally:
        subprocess.run(["umount", "-l", str(place / "lock")], check=True)


def test_a_port_is_for_one_user_from_the_look_to_the_end(users, place):
    anna, ben = users(ANNA, BEN)
    ask = "free_ports.free({'address': '127.0.0.1', 'range': [29700, 29709], 'claims': f'{home}/ports', 'hold_s': 60})"
    for user in (anna, ben):
        user.gets("setattr(free_ports, 'STRIDE', 0)")  # as if both began at the same port
        user.tell(f"{ask}['port']")
    first, second = anna.hear()["value"], ben.hear()["value"]
    assert None not in (first, second)
    assert first != second
    ben.gets("names.update(mine=leases.Leases())")
    said = ben.is_refused(f"mine.claim_port({first})")
    assert said["what"].startswith(f"port {first} is in use by user {ANNA}")
    assert ben.gets(f"mine.claim_port({second})") is None
    assert leases_in(place) == [f"port-{port}" for port in sorted((first, second))]
    ben.gets("mine.end()")
    assert leases_in(place) == [f"port-{first}"]


def test_a_port_that_was_asked_for_long_ago_is_free_again(users, place):
    anna, ben = users(ANNA, BEN)
    ask = "free_ports.free({{'address': '127.0.0.1', 'range': [29710, 29710], 'claims': f'{{home}}/p', 'hold_s': {}}})"
    assert anna.gets(ask.format(0.3))["port"] == 29710
    assert ben.gets(ask.format(60))["port"] is None
    deadline = time.monotonic() + 10
    while ben.gets(ask.format(60))["port"] is None:
        assert time.monotonic() < deadline


def test_a_sweep_leaves_what_is_held(place, monkeypatch):
    monkeypatch.setattr(machine_leases, "PLACES", (str(place / "lock"), str(place / "shm")))
    mine = publish("gpu-GPU-aaaa", {"run": "calm-otter-7"})
    sweep()
    assert leases_in(place) == ["gpu-GPU-aaaa"]
    withdraw(mine)
    assert leases_in(place) == []

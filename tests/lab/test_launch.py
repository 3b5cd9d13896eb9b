"""Starting, watching and stopping work on real hosts, and killing every part of it: nothing is left, and the cause is
named."""

import json
import sys
import time

import pytest

from tests.lab.gang import Gang, assert_nothing_left, events
from tests.lab.hosts import lab_folders


@pytest.fixture
def three(lab):
    return lab(3)


def test_three_hosts_with_different_numbers_of_ranks_are_started_followed_and_stopped(three):
    gang = Gang(three)
    gang.begin()
    now = gang.joined()
    assert now["board"]["done"]
    assert (now["board"]["joined"], now["board"]["ranks"]) == (4, 4)
    assert now["state"]["epoch"] == 1
    assert gang.goes_on()
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["error"], outcome["left"], outcome["unverified"]) == ("stopped", None, [], [])
    assert_nothing_left(three, folder=gang.folder)
    found = [host.run(["grep", "-rl", "hf_canary", gang.folder]).stdout for host in three.hosts]
    assert found == ["", "", ""]


@pytest.mark.lab("python3.8", "python3.13")
def test_hosts_may_have_an_old_and_a_new_python_and_no_rsync(lab):
    hosts = lab(3, special={"h1": {"python": "3.8"}, "h2": {"python": "3.13", "hide": ("rsync", "ensurepip")}})
    gang = Gang(hosts)
    gang.begin()
    gang.joined()
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["error"], outcome["left"]) == ("stopped", None, [])
    assert_nothing_left(hosts, folder=gang.folder)


def test_the_head_looks_after_the_run_and_the_user_may_go(lab):
    hosts = lab(3, meshed=True)
    gang = Gang(hosts, keep="head")
    gang.begin()
    gang.joined()
    hosts.user.kill()  # the laptop falls into the lake
    assert gang.goes_on()
    supervisor = json.loads(hosts.hosts[0].read(f"{gang.folder}/runs/calm-otter-7/state.json"))["supervisor"]
    assert hosts.hosts[0].run(["kill", "-0", str(supervisor["pid"])]).returncode == 0


def test_the_head_is_asked_and_ordered_from_afar(lab):
    hosts = lab(3, meshed=True)
    gang = Gang(hosts, keep="head")
    gang.begin()
    gang.joined()
    assert gang.order("alive") is True
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["left"], outcome["unverified"]) == ("stopped", [], [])
    gang.until(lambda _: gang.order("alive") is False, "nothing is alive")
    assert_nothing_left(hosts, folder=gang.folder)


def test_a_head_that_cannot_log_in_to_the_others_says_so(three):
    said = three.user.call("tests.lab.cases_launch:reasons", hosts=Gang(three).hosts())
    assert said == [
        f"{host} lets no key of h0 in (gangline prepare --between-hosts gives h0 one)" for host in ("h1", "h2")
    ]


def test_a_killed_supervisor_changes_nothing_and_stop_still_works(three):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    gang.lab.user.call("tests.lab.cases_launch:kill_supervisor")
    assert gang.order("alive") is True
    assert gang.goes_on()
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["left"]) == ("stopped", [])
    assert gang.look()["state"]["epoch"] == 2
    assert_nothing_left(three, folder=gang.folder)


KILLS = {
    "host-agent": ("agent.json", "pid", "the gangline agent on h1 died; its ranks were stopped"),
    "launcher": ("agent.json", "torchrun_pid", "torchrun on h1 was killed by SIGKILL"),
    "rank": ("../rank-2.pid", "pid", "rank 2 on h1 was killed by SIGKILL"),
}


@pytest.mark.parametrize("what", KILLS)
def test_a_killed_part_ends_the_gang_everywhere_and_is_named(three, what):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    name, field, words = KILLS[what]
    h1 = three.hosts[1]
    h1.check(["kill", "-9", str(gang.record(h1, f"h1/{name}")[field])])
    outcome = gang.outcome()
    assert outcome["result"] == "failed"
    assert words in outcome["error"]["what"]
    assert (outcome["left"], outcome["unverified"]) == ([], [])
    assert_nothing_left(three, folder=gang.folder)


def test_prefork_processes_go_on_in_the_next_attempt_and_in_the_end_nothing_is_left(three):
    said = Gang(three).call("relay", hosts=Gang(three).hosts())
    assert set(said["ended"]) == {"h0", "h1", "h2"}
    assert {reason for reason, _ in said["ended"].values()} <= {"finished", "broken"}
    assert said["ended"]["h1"][1] == -9
    assert said["same"] == ["h0", "h1"]
    assert said["rests"] == {"h0": False, "h1": False, "h2": True}
    assert said["left"] == []
    assert_nothing_left(three, folder=said["folder"])


def test_cutting_every_ssh_connection_changes_nothing(three):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    for host in three.hosts:
        host.run(["pkill", "-9", "-f", "sshd: .*[@]notty"], as_root=True)
    assert gang.goes_on()
    gang.until(lambda _: gang.order("alive") is True, "they are asked again")
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["error"]) == ("stopped", None)
    assert_nothing_left(three, folder=gang.folder)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_host_that_is_cut_off_for_a_while_is_told_of_and_the_run_goes_on(three):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    three.hosts[2].faults.unplug()
    now = gang.until(lambda now: "unreachable" in events(now), "the silence is told of")
    assert now["events"][-1]["host"] == "h2"
    assert now["state"]["phase"] == "running"
    three.hosts[2].faults.heal()
    gang.until(lambda now: "reachable" in events(now), "the return is told of")
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["unverified"]) == ("stopped", [])
    assert_nothing_left(three, folder=gang.folder)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_that_has_lost_power_is_named_as_not_verified(three):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    three.hosts[2].power_off()
    gang.until(lambda now: "unreachable" in events(now), "the silence is told of")
    gang.order("stop")
    outcome = gang.outcome(timeout_s=90)
    assert (outcome["result"], outcome["left"], outcome["unverified"]) == ("stopped", [], ["h2"])
    assert gang.order("unfinished") == ["h2"]
    assert_nothing_left(three, folder=gang.folder, skip={"h2"})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_a_host_went_on_with_while_it_was_cut_off_is_ended_by_a_second_stop(three):
    gang = Gang(three)
    gang.begin()
    gang.joined()
    three.hosts[2].faults.unplug()
    gang.until(lambda now: "unreachable" in events(now), "the silence is told of")
    gang.order("stop")
    assert gang.outcome(timeout_s=90)["unverified"] == ["h2"]
    three.hosts[2].faults.heal()
    assert three.hosts[2].processes()
    gang.order("stop")
    assert gang.order("unfinished") == []
    assert gang.outcome()["unverified"] == []
    # The connection that was cut off goes when nobody has spoken on it for a minute.
    assert_nothing_left(three, folder=gang.folder, within_s=75)


def test_two_runs_on_the_same_hosts_do_not_touch_each_other(three):
    first, second = Gang(three), Gang(three, run_id="brave-fox-2", workdir="elsewhere")
    first.begin()
    second.begin(port=29600)
    first.joined()
    second.joined()
    first.order("stop")
    assert first.outcome()["result"] == "stopped"
    assert second.goes_on()
    second.order("kill")
    assert second.outcome()["result"] == "stopped"
    assert_nothing_left(three, folder=second.folder)


def test_a_run_that_wants_slots_in_use_is_told_whose_they_are(three):
    first, second = Gang(three), Gang(three, run_id="brave-fox-2")
    first.begin()
    said = second.call("begin", hosts=second.hosts())
    assert "h0: cpu-0 is in use by calm-otter-7" in said["error"]
    assert "gangline stop calm-otter-7" in said["error"]
    first.joined()
    first.order("kill")
    first.outcome()
    assert_nothing_left(three, folder=first.folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_hundred_who_want_the_same_slots_exactly_one_gets_them(three):
    said = three.user.call("tests.lab.cases_launch:compete", hosts=Gang(three).hosts(), num_runs=100)
    assert len(said["winners"]) == 1
    winner = f"run-{said['winners'][0]}"
    assert said["said"] == [f"h0: cpu-0 is in use by {winner}", "started"]
    assert_nothing_left(three, folder=Gang(three).folder)


def waiting(gang, words, *, within_s):
    begun = time.monotonic()
    gang.until(
        lambda now: any(event["event"] == "waiting" and words in event["what"] for event in now["events"]),
        words,
        timeout_s=within_s,
    )
    return time.monotonic() - begun


@pytest.mark.slow
def test_a_port_that_is_dropped_is_named_by_the_start_board(three):
    three.hosts[0].faults.drop(port=29500, peer=three.hosts[2].address)
    gang = Gang(three)
    gang.begin()
    words = "a connection from h2 to h0 (10.77.0.10, port 29500): timed out: packets are dropped on the way"
    assert waiting(gang, words, within_s=30) < 30
    gang.order("kill")
    assert gang.outcome()["result"] == "stopped"
    assert_nothing_left(three, folder=gang.folder)


def test_data_ports_that_are_dropped_are_named_by_the_start_board(three):
    for ports in ("1-21", "23-29499", "29501-65535"):
        three.hosts[0].faults.drop(port=ports)
    gang = Gang(three)
    gang.begin()
    waiting(gang, "gets no answer from h0 (10.77.0.10, port", within_s=30)
    waiting(gang, "timed out: packets are dropped on the way", within_s=30)
    gang.order("kill")
    gang.outcome()
    assert_nothing_left(three, folder=gang.folder)


@pytest.mark.slow
def test_a_host_that_does_not_answer_keeps_the_gang_from_being_started(three):
    gang = Gang(three)
    hosts = gang.hosts()
    hosts[2]["ssh_port"] = 2
    said = gang.call("begin", hosts=hosts)
    assert "h2" in said["error"]
    assert_nothing_left(three, folder=gang.folder)


TORCH = """
import json, os, sys
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
(folder / f"rank-{rank}.pid").write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks}))
import mmap, struct
def enter(phase):
    (folder / f"rank-{rank}.phase").write_bytes(struct.pack("<qqqd", 0, phase, 0, 0.0))
enter(0)
import torch.distributed as dist
enter(1)
dist.init_process_group("gloo")
enter(2)
import time
while True:
    time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("dropped", ["the port where launchers meet", "data ports"])
def test_what_torchrun_would_wait_minutes_for_is_named(lab, dropped):
    """With torch itself: torchrun prints nothing for 900 s, or hangs."""
    hosts = lab(2, binds=lab_folders())
    h0, h1 = hosts.hosts
    if dropped == "data ports":
        for ports in ("1-21", "23-29499", "29501-65535"):
            h0.faults.drop(port=ports)
    else:
        h0.faults.drop(port=29500, peer=h1.address)
    gang = Gang(hosts)
    gang.begin(script=TORCH, python=sys.executable, env={"GLOO_SOCKET_IFNAME": "eth0"})
    stage, words = ("joined", "h1 gets no answer from h0") if dropped == "data ports" else ("port", "from h1 to h0")
    gang.until(lambda now: stage_of(now) == stage, f"the start is at {stage}", timeout_s=120)
    assert waiting(gang, words, within_s=30) < 30
    gang.order("kill")
    assert gang.outcome()["left"] == []
    assert_nothing_left(hosts, folder=gang.folder)


def stage_of(now):
    """What the slowest host has not reached."""
    if now["board"] is None:
        return None
    missing = [
        next((stage for stage in now["board"]["order"] if row["stages"][stage] is None), None)
        for row in now["board"]["hosts"]
    ]
    order = now["board"]["order"]
    return min((stage for stage in missing if stage), key=order.index, default=None)

"""The failure that came first is named; what it did to others is not."""

import pytest

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.supervise.cause import first_cause, gather_failures, leaves_doubt, only_terminated


def request():
    parts = [
        HostRequest(host=host, folder=f"/srv/{host}", rank_files="/srv", argv=(), env={}, agent_argv=())
        for host in ("pc1", "pc2")
    ]
    return LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))


def failure(rank, time=0.0, *, what=None, code=1, ordered=False, seen=""):
    error = None if what is None else {"kind": "RunFailed", "what": what, "seen": seen, "fix": "f", "exit_code": 5}
    return {
        "rank": rank,
        "pid": 4000 + rank,
        "time": time,
        "ordered": ordered,
        "error": error,
        "exit": code,
        "log": f"/srv/rank-{rank}.log",
        "log_tail": ["the last words"],
    }


def ended(host, *failures, returncode=1, reason="finished", console=()):
    return HostStatus(
        host=host,
        phase="ended",
        returncode=returncode,
        reason=reason,
        failures=failures,
        console_tail=console,
        error=next((each["error"] for each in failures if each["error"]), None),
    )


def cause(*statuses):
    return first_cause(request(), statuses)


GLOO = [
    "gloo/transport/tcp/pair.cc:537] Read error [10.77.0.12]:46787: Connection reset by peer.",
    "gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711",
    "gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 60000ms for send operation to complete",
    "Gloo connectFullMesh failed with ... Connection refused, remote=[127.0.0.1]:10640$0",
]


def test_when_all_is_well_there_is_no_cause():
    assert cause(ended("pc1", returncode=0), ended("pc2", returncode=0)) is None


@pytest.mark.parametrize("words", GLOO)
def test_an_echo_of_a_later_clock_or_an_earlier_one_is_not_the_cause(words):
    for time in (-5.0, 5.0):
        found = cause(ended("pc1", failure(0, time, what=words)), ended("pc2", failure(1, 0.0, what="CUDA broke")))
        assert found["what"] == "rank 1 on pc2: CUDA broke"


def test_an_echo_may_stand_in_the_traceback():
    echo = failure(0, what="RuntimeError", seen=f"Traceback ...\n{GLOO[0]}")
    assert cause(ended("pc1", echo), ended("pc2", failure(1, 9.0, what="disk full")))["rank"] == 1


def test_a_kill_from_outside_is_a_cause():
    found = cause(ended("pc1", failure(0, what=GLOO[0])), ended("pc2", failure(1, 0.1, code=-9)))
    assert found["what"] == "rank 1 on pc2 was killed by SIGKILL"
    assert "the last words" in found["seen"]
    assert (found["host"], found["rank"], found["log"]) == ("pc2", 1, "/srv/rank-1.log")
    assert found["exit_code"] == 5


def test_the_error_of_a_user_keeps_its_kind():
    error = failure(1, what="row 7 is empty")
    error["error"]["kind"], error["error"]["exit_code"] = "DataError", 2
    found = cause(ended("pc1"), ended("pc2", error))
    assert (found["kind"], found["exit_code"], found["log_tail"]) == ("DataError", 2, ["the last words"])


def test_of_two_real_errors_on_one_host_the_earlier_counts():
    assert cause(ended("pc1", failure(0, 2.0, what="b"), failure(1, 1.0, what="a")))["rank"] == 1


def test_of_two_on_different_hosts_the_one_that_was_seen_first_whatever_their_clocks_say():
    statuses = [ended("pc1", failure(0, 1.0, what="b")), ended("pc2", failure(1, 9.0, what="a"))]
    assert first_cause(request(), statuses, seen=["pc2", "pc1"])["rank"] == 1
    assert first_cause(request(), statuses, seen=["pc1", "pc2"])["rank"] == 0


def test_what_more_is_known_of_the_end_of_a_rank_counts_more_than_its_own_words():
    memory = RunFailed("rank 1 on pc2 ran out of memory", seen="28 GiB", fix="lower micro_batch")
    status = ended("pc2", failure(1, code=-9))
    found = first_cause(request(), [status], explain=lambda failure: memory if failure["rank"] == 1 else None)
    assert (found["what"], found["fix"], found["host"]) == (memory.what, memory.fix, "pc2")


def test_replicas_that_differ_are_the_same_cause_whichever_rank_says_it_first():
    error = {"kind": "BadState", "what": "rank 2 differs", "seen": "", "fix": "", "exit_code": 5}
    rows = [{**failure(rank, what="x"), "error": error} for rank in (0, 1)]
    found = cause(ended("pc1", rows[0]), ended("pc2", rows[1]))
    assert (found["what"], "rank" in found) == ("rank 2 differs", False)


def test_what_torchrun_or_an_order_ended_is_not_the_cause():
    tidied = failure(0, 0.0, code=-15)
    unknown = failure(2, 0.0, code=None)
    ordered = failure(3, 0.0, code=-9, ordered=True)
    assert cause(ended("pc1", tidied, unknown, ordered), ended("pc2", failure(1, 3.0, code=1)))["rank"] == 1


def test_a_rank_that_ended_with_a_code_and_no_word():
    assert cause(ended("pc1", failure(0, code=3)))["what"] == "rank 0 on pc1 ended with exit code 3"


def test_a_host_agent_that_is_gone_outweighs_echoes():
    found = cause(ended("pc1", failure(0, what=GLOO[0])), HostStatus(host="pc2", phase="lost"))
    assert found["what"] == "the gangline agent on pc2 died; its ranks were stopped"


def test_a_killed_launcher_outweighs_echoes():
    found = cause(
        ended("pc1", failure(0, what=GLOO[0])), ended("pc2", returncode=-9, reason="signalled", console=("hm",))
    )
    assert found["what"] == "torchrun on pc2 was killed by SIGKILL, and no rank reported an error"


def test_only_echoes_are_better_than_nothing():
    assert cause(ended("pc1", failure(0, what=GLOO[0])))["what"].startswith("rank 0 on pc1: gloo")


def test_before_any_rank_ran_the_console_tells():
    console = ("ModuleNotFoundError: No module named 'peft'",)
    found = cause(ended("pc1", reason="killed"), ended("pc2", returncode=1, console=console))
    assert found["host"] == "pc2"
    assert "No module named 'peft'" in found["seen"]
    assert "/srv/pc2/console.log" in found["fix"]


def test_ranks_that_would_not_leave_are_told_of():
    found = cause(ended("pc1", returncode=0, reason="stopped"), ended("pc2", returncode=-9, reason="killed"))
    assert found["what"] == "the ranks on pc2 did not exit in time and were killed"
    assert "saw no progress for 120 s" in found["seen"]


def test_after_an_order_a_rank_that_lost_the_others_has_not_failed():
    statuses = [ended("pc1", returncode=0, reason="stopped"), ended("pc2", failure(1, what=GLOO[0], code=5))]
    assert first_cause(request(), statuses)["rank"] == 1
    assert first_cause(request(), statuses, ordered=True) is None


def test_after_an_order_a_torchrun_that_lost_the_others_before_its_ranks_began_has_not_failed():
    lost = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
    statuses = [ended("pc1", returncode=0, reason="stopped"), ended("pc2", console=("Traceback", lost))]
    assert first_cause(request(), statuses) is not None
    assert first_cause(request(), statuses, ordered=True) is None


def test_after_an_order_a_torchrun_that_ends_by_the_same_signal_has_not_failed():
    statuses = [ended("pc1", returncode=0, reason="stopped"), ended("pc2", returncode=-15, reason="signalled")]
    assert first_cause(request(), statuses) is not None
    assert first_cause(request(), statuses, ordered=True) is None
    killed = ended("pc2", returncode=-9, reason="signalled")
    assert first_cause(request(), [statuses[0], killed], ordered=True) is not None


def test_after_an_order_a_torchrun_that_cannot_start_has_failed():
    missing = ended("pc2", console=("ModuleNotFoundError: No module named 'torch'",))
    assert first_cause(request(), [ended("pc1", returncode=0, reason="stopped"), missing], ordered=True) is not None


def test_ranks_that_slurm_ends_before_the_supervisor_hears_of_it_are_only_terminated():
    terminated = ended("pc1", failure(0, code=-15)), ended("pc2", failure(1, code=-15))
    assert only_terminated(request(), terminated)
    assert not only_terminated(request(), [ended("pc1", returncode=0), ended("pc2", returncode=0)])
    assert not only_terminated(request(), [terminated[0], ended("pc2", failure(1, what="row 7 is empty"))])
    assert not only_terminated(request(), [terminated[0], ended("pc2", failure(1, code=-9))])


def test_after_an_order_an_error_of_its_own_is_still_a_failure():
    statuses = [ended("pc1", failure(0, what=GLOO[0])), ended("pc2", failure(1, what="no space left", ordered=True))]
    assert first_cause(request(), statuses, ordered=True)["rank"] == 1


def test_a_program_that_dies_of_the_order_has_left_as_told():
    statuses = [ended("pc1", failure(0, code=-15, ordered=True), reason="stopped")]
    assert first_cause(request(), statuses) is None
    assert first_cause(request(), [ended("pc1", failure(0, code=-11, ordered=True), reason="stopped")]) is not None


def test_a_host_that_does_not_answer_is_the_cause_of_what_happens_elsewhere():
    silent = HostStatus(host="pc2", phase="unreachable", why="no answer for 6 s", since=0.0)
    found = cause(ended("pc1", failure(0, what=GLOO[0])), silent)
    assert (
        found["what"] == "pc2 does not answer since 1970-01-01T00:00:00.000Z, and the ranks on other hosts have failed"
    )
    assert cause(ended("pc1", failure(0, what="row 7 is empty")), silent)["rank"] == 0
    assert cause(HostStatus(host="pc1", phase="running"), silent) is None


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.1.1", "another rank gave 127.0.1.1"), ("10.77.0.10", "no connection to another rank")],
)
def test_a_mesh_that_does_not_come_about_is_explained(address, words):
    seen = f"Gloo connectFullMesh failed with ... Connection refused, remote=[{address}]:18864$0"
    found = cause(ended("pc1", failure(0, what="RuntimeError", seen=seen)))
    assert words in found["what"]
    assert found["fix"]


def test_ranks_that_did_not_join_in_time_are_told_of():
    found = cause(ended("pc1", returncode=-9, reason="late"))
    assert found["what"] == "the ranks on pc1 did not join in time; the gangline agent there stopped them"


def test_all_failures_are_kept_with_their_hosts():
    statuses = [ended("pc1", failure(0, 1.0, what=GLOO[0])), ended("pc2", failure(1, 2.0, code=-9))]
    assert [(each["host"], each["rank"]) for each in gather_failures(statuses)] == [("pc2", 1), ("pc1", 0)]


TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def test_a_port_that_another_program_took_is_named_with_its_host():
    error = cause(ended("pc1", console=["Traceback ...", TAKEN]), ended("pc2", reason="killed"))
    assert error["what"] == "another program took port 29500 of pc1, where the ranks were to meet"
    assert TAKEN in error["seen"]
    assert error["log"] == "/srv/pc1/console.log"


def test_an_interface_that_a_host_does_not_have_is_named_with_it():
    words = "[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: enp5s0"
    bad = {**failure(1), "log_tail": [words]}
    error = cause(ended("pc1", reason="killed"), ended("pc2", bad))
    assert error["what"] == "rank 1 on pc2: pc2 has no network interface enp5s0 with an address"
    assert "GLOO_SOCKET_IFNAME" in error["fix"]


def test_ranks_that_only_lost_each_other_leave_a_doubt():
    assert leaves_doubt([ended("pc1", failure(0, what=GLOO[0])), ended("pc2", failure(1, what=GLOO[2]))])
    assert leaves_doubt([ended("pc1", reason="late"), ended("pc2", reason="broken")])


@pytest.mark.parametrize(
    "status",
    [
        ended("pc2", failure(1, what="CUDA out of memory")),
        ended("pc2", failure(1, code=-9)),
        ended("pc2", reason="signalled", returncode=-9),
        HostStatus(host="pc2", phase="lost"),
        HostStatus(host="pc2", phase="unreachable"),
    ],
)
def test_what_failed_by_itself_leaves_none(status):
    assert not leaves_doubt([ended("pc1", failure(0, what=GLOO[0])), status])

"""Where every error of the user's own script is one of waiting, the rank that did not come is named: no rank that waited."""

import pytest

from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.supervise.cause import first_cause

HOSTS = {"pc1": (0, 1), "pc2": (2,)}
WAITED = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
ASLEEP = "load_rows (train.py:9)"
REDUCE = "train (train.py:31)"


def request(program="command"):
    parts = [
        HostRequest(
            host=host,
            folder=f"/srv/{host}",
            rank_files="/srv",
            argv=(),
            env={},
            agent_argv=(),
            ranks=ranks,
            program=program,
        )
        for host, ranks in HOSTS.items()
    ]
    return LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))


def gave_up(rank, words=WAITED, *, line=31, at=1.0):
    """A rank that raised in a collective."""
    lines = [
        f"[rank{rank}]: Traceback (most recent call last):",
        f'[rank{rank}]:   File "/home/ann/train.py", line {line}, in train',
        f'[rank{rank}]:   File "/opt/v/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper',
        f"[rank{rank}]: {words}",
    ]
    return ended_rank(rank, code=1, at=at, lines=lines)


def ended_rank(rank, where="", *, waits=False, state="S", code=None, at=2.0, ordered=False, lines=("step 3",)):
    """One that was ended, and had told where it stood."""
    row = {"pid": 40 + rank, "state": state, "where": where, "waits": waits, "stack": [where] * bool(where)}
    return {
        "rank": rank,
        "pid": 40 + rank,
        "time": at,
        "ordered": ordered,
        "error": None,
        "exit": code,
        "log": f"/srv/rank-{rank}.log",
        "log_tail": list(lines),
        **({"stack": row} if where or state in "TD" else {}),
    }


def cause(*failures, program="command", well=()):
    statuses = [
        HostStatus(
            host=host,
            phase="ended",
            returncode=0 if host in well else 1,
            reason="stopped",
            left_early=ranks if host in well else (),
            failures=tuple(each for each in failures if each["rank"] in ranks),
        )
        for host, ranks in HOSTS.items()
    ]
    return first_cause(request(program), statuses)


def test_the_rank_that_stands_elsewhere_is_named_with_its_line_and_not_one_that_gave_up():
    found = cause(gave_up(0), ended_rank(1, REDUCE, waits=True), ended_rank(2, ASLEEP, ordered=True, code=-15))
    assert found["what"] == f"rank 2 on pc2 stands at {ASLEEP}, and the others waited for it"
    assert (found["host"], found["rank"]) == ("pc2", 2)
    assert f"rank 0 on pc1 gave up waiting at {REDUCE}" in found["seen"].splitlines()
    assert ASLEEP in found["fix"]


def test_one_on_the_host_of_the_rank_that_gave_up_is_named_though_torchrun_ended_it():
    found = cause(gave_up(0), ended_rank(1, ASLEEP, code=-15), gave_up(2))
    assert found["rank"] == 1


def test_a_rank_at_the_line_where_others_gave_up_waited_too():
    """It waits for a GPU there, and nothing on its stack says so."""
    found = cause(gave_up(0), ended_rank(1, REDUCE), ended_rank(2, ASLEEP, ordered=True))
    assert found["rank"] == 2


def test_a_rank_that_did_not_come_to_a_monitored_barrier_is_named_and_not_the_one_that_says_so():
    words = "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 5000 ms"
    assert cause(gave_up(0, words), ended_rank(2, ASLEEP, ordered=True, code=-15))["rank"] == 2


def test_a_stopped_process_is_named():
    found = cause(gave_up(0), gave_up(1), ended_rank(2, state="T", ordered=True, code=-9))
    assert found["what"].startswith("rank 2 on pc2 is stopped (SIGSTOP), and the others")


def test_a_rank_in_another_collective_is_named_as_such():
    found = cause(gave_up(0), gave_up(1), gave_up(2, LOST, line=44))
    assert found["what"].startswith("rank 2 on pc2 calls another collective than the rest, at train (train.py:44)")
    assert "same collectives, in the same order" in found["fix"]


def collective(failure, operation, sizes="[1024]", number=6):
    return {**failure, "collective": {"group": "0", "number": number, "operation": operation, "sizes": sizes}}


def test_the_rank_whose_collective_is_another_one_is_named_with_both():
    calls = [collective(gave_up(0), "all_reduce"), collective(gave_up(1), "all_reduce")]
    found = cause(*calls, collective(gave_up(2, LOST), "barrier", ""))
    assert found["what"].startswith("rank 2 on pc2 calls another collective than the rest")
    assert "collective 6: all_reduce of [1024]: ranks 0 and 1" in found["seen"].splitlines()
    assert "collective 6: barrier: rank 2" in found["seen"].splitlines()


def test_two_ranks_that_do_not_call_the_same_are_both_told_and_none_is_accused():
    found = cause(collective(gave_up(0), "all_reduce"), collective(gave_up(2, LOST, line=44), "all_reduce", "[4096]"))
    assert found["what"] == (
        "the ranks do not call the same collective: "
        "collective 6: all_reduce of [1024]: rank 0; collective 6: all_reduce of [4096]: rank 2"
    )
    assert found["rank"] is None


def test_one_that_raised_and_was_ended_before_it_had_left_is_one_of_those_that_gave_up():
    last = collective(gave_up(2, LOST, line=44), "barrier", "") | {"exit": -15, "ordered": True}
    found = cause(collective(gave_up(0), "all_reduce"), collective(gave_up(1), "all_reduce"), last)
    assert found["what"].startswith("rank 2 on pc2 calls another collective than the rest, at train (train.py:44)")


def test_a_rank_that_gloo_aborts_for_a_larger_message_may_be_right():
    words = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2732 vs 684."
    aborted = ended_rank(1, REDUCE, waits=True, code=-6, lines=[words])
    calls = [collective(gave_up(0, LOST), "all_reduce"), collective(gave_up(2, LOST), "all_reduce", "[4096]")]
    found = cause(aborted, *calls)
    assert found["what"].startswith("the ranks do not call the same collective: ")
    assert found["rank"] is None


def test_ranks_in_collectives_of_other_numbers_may_only_be_late():
    calls = [collective(gave_up(0), "all_reduce"), collective(gave_up(1), "barrier", "", number=5)]
    found = cause(*calls, ended_rank(2, ASLEEP, ordered=True, code=-15))
    assert found["rank"] == 2
    assert "collective 5" not in found["seen"]


def test_a_rank_that_stands_elsewhere_counts_more_than_collectives_that_differ():
    calls = [collective(gave_up(0), "all_reduce"), collective(gave_up(1), "barrier")]
    assert cause(*calls, ended_rank(2, ASLEEP, ordered=True, code=-15))["rank"] == 2


def test_where_all_wait_at_the_same_line_nobody_is_accused_by_it():
    found = cause(gave_up(0), gave_up(1), ended_rank(2, REDUCE, waits=True, ordered=True))
    assert found["what"] == ("2 ranks lost another one, or gave up waiting for it, and nothing tells which one it was")
    assert found["rank"] is None
    assert f"rank 1 on pc1: {WAITED}" in found["seen"].splitlines()


def test_a_rank_that_did_not_get_to_where_ranks_meet_is_named_and_not_those_that_were_there():
    words = "torch.distributed.DistNetworkError: The client socket has failed to connect to (127.0.0.9, 9)."
    there = "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0//cpu//0/2"
    found = cause(gave_up(0, there), gave_up(1, there), gave_up(2, words))
    assert found["what"] == f"rank 2 on pc2 did not connect to where the ranks meet: {words}"
    assert "MASTER_ADDR" in found["fix"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_left_well_before_the_others_is_named(rank):
    left = ended_rank(1, at=0.5) if rank == 1 else None
    others = [gave_up(each, LOST) for each in (0, 1, 2) if each != rank]
    found = cause(*([left] if left else []), *others, well=("pc2",) if rank == 2 else ())
    host = "pc1" if rank == 1 else "pc2"
    assert found["what"].startswith(f"rank {rank} on {host} left before the others, with exit code 0")
    assert (found["host"], found["rank"]) == (host, rank)


def test_a_signal_from_outside_is_told_as_such_and_one_of_torchrun_is_not():
    found = cause(gave_up(0, LOST), gave_up(1, LOST), ended_rank(2, ASLEEP, code=-15, at=0.5))
    assert found["what"] == f"rank 2 on pc2 was ended by SIGTERM at {ASLEEP}, which gangline had not sent"
    found = cause(gave_up(0, at=1.0), ended_rank(1, REDUCE, waits=True, code=-15, at=1.1), gave_up(2, at=1.0))
    assert "SIGTERM" not in found["what"]


def test_a_crash_is_told_with_the_line_of_the_script():
    found = cause(ended_rank(2, ASLEEP, code=-11), gave_up(0, LOST))
    assert found["what"] == f"rank 2 on pc2 was killed by SIGSEGV in {ASLEEP}"


def test_an_error_of_a_ranks_own_counts_more_than_where_others_stood():
    raised = ended_rank(2, code=1, lines=["ValueError: no such column: text"])
    found = cause(gave_up(0, LOST), ended_rank(1, ASLEEP, code=-15), raised)
    assert found["what"] == "rank 2 on pc2: ValueError: no such column: text"


def test_our_own_trainer_says_more_itself():
    found = cause(gave_up(0), ended_rank(2, ASLEEP, ordered=True), program="worker")
    assert "stands at" not in found["what"]

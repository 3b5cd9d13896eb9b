"""Whether a run goes on after a failure, and on which hosts."""

import pytest

from gangline.runs.job import FailureJob
from gangline.supervise.attempts import EndedAttempt, choose_hosts, pause_s, why_not

KILLED = {"kind": "RunFailed", "what": "rank 1 on pc2 was killed by SIGKILL", "host": "pc2", "rank": 1}
LOST = {"kind": "RunFailed", "what": "pc3 does not answer since 12:31:07", "host": "pc3"}
HOSTS = ("pc1", "pc2", "pc3")


def tried(error=KILLED, began_at=0, reached=0):
    return EndedAttempt(error=error, began_at=began_at, reached=reached)


def test_a_first_failure_is_followed_by_another_attempt():
    assert why_not([tried()], FailureJob()) is None


def test_a_job_may_end_at_the_first_failure():
    assert "the job ends the run" in why_not([tried(reached=40)], FailureJob(restarts=0))


def test_the_same_cause_twice_without_a_step_between_ends_the_run():
    assert "twice for the same cause" in why_not([tried(), tried()], FailureJob())


def test_numbers_do_not_make_it_another_cause():
    again = {**KILLED, "what": "rank 1 on pc2: MemoryError at step 41, process 4711"}
    other = {**KILLED, "what": "rank 1 on pc2: MemoryError at step 42, process 9000"}
    assert why_not([tried(again), tried(other)], FailureJob()) is not None


def test_less_memory_is_another_cause_as_long_as_micro_batches_get_smaller():
    short = {**KILLED, "what": "rank 1 on pc2 ran out of GPU memory"}
    sizes = [tried({**short, "micro_batch": size}) for size in (4, 2, 1)]
    assert why_not(sizes, FailureJob()) is None
    assert why_not([*sizes, tried({**short, "micro_batch": None})], FailureJob()) is None
    assert "twice for the same cause" in why_not([tried({**short, "micro_batch": None})] * 2, FailureJob())


def test_each_of_many_alike_ranks_may_run_out_of_memory_once_a_size():
    """Eight of them, from 8 to 1, without a step between."""
    lacks = [
        {"kind": "OutOfMemory", "what": f"rank {rank} on pc{rank} ran out of GPU memory", "host": f"pc{rank}"}
        | {"rank": rank, "micro_batch": size}
        for size in (4, 2, 1)
        for rank in range(8)
    ]
    attempts = [EndedAttempt(error=lack, began_at=0, reached=0, shrinks=True) for lack in lacks]
    assert all(why_not(attempts[:count], FailureJob(restarts=2)) is None for count in range(1, len(attempts) + 1))
    assert pause_s(attempts) == 0.0
    last = [tried({**lack, "micro_batch": None}) for lack in lacks[:2]]
    assert why_not([*attempts, last[0]], FailureJob(restarts=2)) is None
    assert why_not([*attempts, *last], FailureJob(restarts=2)) == "2 attempts in a row did not get past step 0"
    assert "twice for the same cause" in why_not([*attempts, last[0], last[0]], FailureJob())


def test_the_same_cause_after_some_progress_is_bad_luck():
    attempts = [tried(began_at=0, reached=30), tried(began_at=30, reached=60), tried(began_at=60, reached=90)]
    assert why_not(attempts, FailureJob(restarts=2)) is None


def test_other_causes_each_time_end_it_after_as_many_attempts_as_the_job_allows():
    attempts = [tried({**KILLED, "what": f"{name} failed"}, began_at=30, reached=30) for name in "abcde"]
    assert why_not(attempts[:4], FailureJob(restarts=5)) is None
    assert why_not(attempts, FailureJob(restarts=5)) == "5 attempts in a row did not get past step 30"


def test_a_program_whose_steps_nobody_knows_is_started_as_often_as_its_user_says():
    starts = [EndedAttempt(error=KILLED, began_at=0, reached=0, starts=number) for number in (1, 2, 3)]
    assert why_not(starts[:2], FailureJob(restarts=2)) is None
    assert why_not(starts, FailureJob(restarts=2)) == "it was started 3 times"


def test_what_was_asked_for_wrongly_is_not_tried_again():
    assert why_not([tried({"kind": "DataError", "what": "row 7 is empty"}, reached=40)], FailureJob()) is not None


def test_progress_starts_the_count_anew():
    attempts = [tried(LOST), tried(KILLED), tried(LOST, reached=10), tried(KILLED, began_at=10, reached=10)]
    assert why_not(attempts, FailureJob(restarts=2)) is None


@pytest.mark.parametrize(("in_vain", "seconds"), [(0, 0.0), (1, 0.0), (2, 2.0), (3, 4.0), (4, 8.0), (20, 60.0)])
def test_each_attempt_in_vain_waits_longer(in_vain, seconds):
    assert pause_s([tried(reached=1), *[tried()] * in_vain]) == seconds


def of(silent_s, left=(), **how):
    return choose_hosts(HOSTS, silent_s=silent_s, left=left, failures=FailureJob(**how))


def test_all_hosts_that_answer_take_part():
    found = of({})
    assert (found.hosts, found.waits_for, found.without) == (HOSTS, (), ())


def test_a_host_that_does_not_answer_is_waited_for():
    found = of({"pc2": 29.0})
    assert (found.hosts, found.waits_for, found.without) == (("pc1", "pc3"), ("pc2",), ())


def test_and_then_the_others_go_on_without_it():
    found = of({"pc2": 30.0})
    assert (found.hosts, found.waits_for, found.without) == (("pc1", "pc3"), (), ("pc2",))


def test_unless_the_job_wants_all_of_them():
    assert of({"pc2": 300.0}, without=False).waits_for == ("pc2",)


def test_a_host_that_left_is_not_waited_for():
    found = of({"pc3": 0.0}, left=("pc3",))
    assert (found.hosts, found.waits_for, found.without) == (("pc1", "pc2"), (), ("pc3",))

"""Ranks join only in the store of their own gang, and on one computer nobody else reaches it."""

from tests.train import cases_meeting


def test_ranks_that_come_to_the_store_of_another_run_do_not_join(zygote):
    said = zygote.fork(cases_meeting.meet, tokens=["a", "a", "b", "b", "a"], ranks=[0, 1, 0, 1, 1]).result()
    assert said == [
        "joins",
        "joins",
        "rank 0 of calm-otter-7 has met the ranks of another run",
        "rank 1 of calm-otter-7 has met the ranks of another run",
        "joins",
    ]


def test_the_store_of_a_rank_on_one_computer_listens_for_it_alone(zygote):
    assert zygote.fork(cases_meeting.doors).result() == ["loopback", "loopback"]


def test_a_rank_that_comes_before_rank_0_listens_waits_for_that_and_not_for_ever(zygote):
    assert zygote.fork(cases_meeting.early).result() == [True, False]

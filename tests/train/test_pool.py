"""The ranks that the other training tests use."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.train import cases_pool
from tests.train.pool import ROOT, RankFailure


def test_ranks_share_a_group_and_live_on(pool):
    first = pool(3).run(cases_pool.rank_and_sum, start=0.5)
    second = pool(3).run(cases_pool.rank_and_sum, start=1.5)
    assert [row[:3] for row in first] == [[0, 3, 4.5], [1, 3, 4.5], [2, 3, 4.5]]
    assert [row[2] for row in second] == [7.5, 7.5, 7.5]
    assert [row[3] for row in first] == [row[3] for row in second]


def test_ddp_works_in_the_pool(pool):
    assert pool(2).run(cases_pool.gradient) == [[[1.0] * 4]] * 2


def test_a_case_does_not_see_what_another_changed(pool):
    assert pool(2).run(cases_pool.draw) == pool(2).run(cases_pool.draw)


def test_groups_of_a_case_and_their_threads_end_with_it(pool):
    threads = []
    for _ in range(4):
        sums, num_threads = zip(*pool(2).run(cases_pool.group_and_threads), strict=True)
        assert sums == (2.0, 2.0)
        threads.append(num_threads)
    assert threads == threads[:1] * 4


def test_an_exception_in_a_rank_fails_the_test_with_its_traceback(pool):
    with pytest.raises(RankFailure, match=r"rank-1: Traceback[\s\S]*the flour is damp"):
        pool(2).run(cases_pool.fail_on, rank=1)
    assert pool(2).run(cases_pool.rank_and_sum, start=0)[0][2] == 1


def test_a_rank_that_dies_fails_the_test_and_the_next_gets_new_ranks(pool):
    with pytest.raises(RankFailure, match=r"rank-0 died, exit status -9"):
        pool(2).run(cases_pool.die_on, rank=0)
    assert pool(2).run(cases_pool.rank_and_sum, start=0)[0][2] == 1


def test_a_hang_shows_where_the_ranks_were(pool):
    with pytest.raises(RankFailure, match=r"did not answer in time[\s\S]*in wait_for_ever"):
        pool(1).run(cases_pool.wait_for_ever, timeout_s=3.0)  # ranks clear away what was before first


def test_fork_gives_a_process_that_may_die(zygote):
    assert zygote.fork(cases_pool.double, value=21).result() == 42
    assert zygote.fork(cases_pool.die_by, number=int(signal.SIGTERM)).wait() == -signal.SIGTERM


def test_a_gang_can_be_killed_rank_by_rank(zygote):
    gang = zygote.gang(2, cases_pool.wait_for_ever)
    gang.children[1].kill()
    assert gang.children[1].wait() == -signal.SIGKILL
    gang.close()
    assert [child.returncode for child in gang.children] == [-signal.SIGKILL] * 2


def test_pytest_itself_needs_no_torch_for_the_pool():
    code = "import sys, tests.train.pool; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_nothing_outlives_pytest(tmp_path):
    code = (
        "import signal; from tests.train.pool import Zygote; zygote = Zygote(imports=False); "
        "children = [zygote.fork(signal.pause) for _ in range(2)]; "
        "print(zygote.process_id, *[child.pid for child in children], flush=True); input()"
    )
    pytest_stand_in = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with pytest_stand_in:
        descriptors = [os.pidfd_open(int(pid)) for pid in pytest_stand_in.stdout.readline().split()]
        pytest_stand_in.kill()
    assert len(descriptors) == 3
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10)[0], "a process is still there"
        os.close(descriptor)

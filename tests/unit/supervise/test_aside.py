"""Work that hangs keeps nobody waiting, and is not done twice at a time."""

import threading

import pytest

from gangline.supervise.lost_hosts import Aside


class Work:
    """Counts; waits for the gate; fails once it is told to."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.begun = 0
        self.error = None

    def __call__(self):
        self.begun += 1
        number = self.begun
        self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
def work():
    made = Work()
    yield made
    made.gate.set()


def test_quick_work_gives_its_result_at_once(work):
    aside = Aside(work, patience_s=20)
    assert [aside.do(), aside.do()] == [1, 2]


def test_work_that_hangs_is_left_to_itself_and_not_begun_again(work):
    aside = Aside(work, patience_s=0.01)
    work.gate.clear()
    assert [aside.do(), aside.do(), aside.do()] == [None, None, None]
    assert work.begun == 1
    work.gate.set()
    assert list(aside.finish()) == [1, 2]
    assert list(aside.finish()) == [3]


def test_work_that_fails_says_so_to_who_asks(work):
    aside = Aside(work, patience_s=20)
    work.error = OSError("pc2: Connection lost")
    with pytest.raises(OSError, match="pc2"):
        aside.do()
    work.error = None
    assert aside.do() == 2


def test_the_last_of_it_is_done_though_what_went_before_failed(work):
    aside = Aside(work, patience_s=0.01)
    work.gate.clear()
    work.error = OSError("pc2: Connection lost")
    assert aside.do() is None
    work.gate.set()
    aside._running.exception()
    work.error = None
    assert list(aside.finish()) == [2]

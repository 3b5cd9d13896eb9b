"""Work that hangs keeps nobody waiting, and is not done twice at a time."""

import threading

import pytest

from gangline.supervise.background import Background


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
    background = Background(patience_s=20)
    assert [background.do(work), background.do(work)] == [1, 2]


def test_work_that_hangs_is_left_to_itself_and_not_begun_again(work):
    background = Background(patience_s=0.01)
    work.gate.clear()
    assert [background.do(work), background.do(work), background.do(work)] == [None, None, None]
    assert work.begun == 1
    work.gate.set()
    assert list(background.finish(work)) == [1, 2]
    assert list(background.finish(work)) == [3]


def test_work_that_fails_says_so_to_who_asks(work):
    background = Background(patience_s=20)
    work.error = OSError("pc2: Connection lost")
    with pytest.raises(OSError, match="pc2"):
        background.do(work)
    work.error = None
    assert background.do(work) == 2


def test_the_last_of_it_is_done_though_what_went_before_failed(work):
    background = Background(patience_s=0.01)
    work.gate.clear()
    work.error = OSError("pc2: Connection lost")
    assert background.do(work) is None
    work.gate.set()
    background._running[""][1].exception()
    work.error = None
    assert list(background.finish(work)) == [2]

"""Many hosts are asked at once, and what all of them need is made once."""

import threading

import pytest

from gangline.transport.fanout import once


def test_all_who_come_at_the_same_time_get_what_one_of_them_made():
    made, answers = [], []
    first, go = threading.Event(), threading.Event()

    @once
    def build(name):
        made.append(name)
        first.set()
        assert go.wait(20)
        return object()

    threads = [threading.Thread(target=lambda: answers.append(build("agent"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    assert first.wait(20)
    go.set()
    for thread in threads:
        thread.join()
    assert made == ["agent"]
    assert len(set(answers)) == 1


def test_each_question_has_its_own_answer_and_a_failure_is_not_kept():
    tried = []

    @once
    def build(name):
        tried.append(name)
        if len(tried) == 1:
            raise OSError("not yet")
        return name.upper()

    with pytest.raises(OSError, match="not yet"):
        build("a")
    assert [build("a"), build("b"), build("a")] == ["A", "B", "A"]
    assert tried == ["a", "a", "b"]

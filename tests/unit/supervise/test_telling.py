"""Orders that are on their way."""

import threading

import pytest

from gangline.supervise.supervisor import Telling
from tests.waiting import wait_until


def test_who_hears_at_once_is_not_told_again_and_who_does_not_is_told_until_it_does():
    said = []

    def tell(host, word):
        said.append((host, word))
        return host == "pc1" or len(said) > 2

    telling = Telling(tell, patience_s=20.0)
    assert telling.tell({"pc1", "pc2"}, "stop") == {"pc1"}
    assert telling.tell({"pc2"}, "stop") == {"pc2"}
    assert sorted(said) == [("pc1", "stop"), ("pc2", "stop"), ("pc2", "stop")]


def test_a_host_that_hangs_is_waited_for_once_and_hears_the_newest_word_in_the_end():
    let_go = threading.Event()
    said = []

    def tell(host, word):
        said.append((host, word))
        return host == "pc1" or let_go.wait(20)

    telling = Telling(tell, patience_s=0.05)
    assert telling.tell({"pc1", "pc2"}, "stop") == {"pc1"}
    assert telling.tell({"pc1", "pc2"}, "kill") == {"pc1"}
    assert ("pc2", "kill") not in said
    let_go.set()
    heard = set()
    wait_until(lambda: heard.update(telling.tell({"pc2"}, "kill")) or heard, "pc2 hears")
    assert said.count(("pc2", "stop")) == 1
    assert ("pc2", "kill") in said


def test_what_goes_wrong_is_raised_and_can_be_tried_again():
    problems = [KeyError("no such host")]

    def tell(_host, _word):
        if problems:
            raise problems.pop()
        return True

    telling = Telling(tell, patience_s=20.0)
    with pytest.raises(KeyError):
        telling.tell({"pc1"}, "stop")
    assert telling.tell({"pc1"}, "stop") == {"pc1"}

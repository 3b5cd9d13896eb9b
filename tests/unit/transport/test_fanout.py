"""Many hosts at once."""

import threading
import time

import pytest

from gangline.errors import HostUnreachable
from gangline.transport.fanout import fan_out


def test_every_target_gives_its_value_or_its_error():
    def ask(number):
        if number == 2:
            raise HostUnreachable("h2 does not answer")
        return number * 10

    outcomes = fan_out(ask, {"h3": 3, "h1": 1, "h2": 2}, timeout_s=10)
    assert list(outcomes) == ["h3", "h1", "h2"]
    assert (outcomes["h1"].get(), outcomes["h3"].value) == (10, 30)
    with pytest.raises(HostUnreachable, match="h2 does not answer"):
        outcomes["h2"].get()


def test_nobody_is_asked_of_nobody():
    assert fan_out(len, {}, timeout_s=1) == {}


def test_one_that_never_answers_costs_its_time_limit_and_no_more():
    never = threading.Event()
    seen = []
    begun = time.monotonic()
    outcomes = fan_out(
        lambda name: never.wait() if name == "dead" else name,
        {name: name for name in ("h0", "dead", "h1")},
        timeout_s=0.5,
        on_outcome=lambda name, _outcome: seen.append((name, time.monotonic() - begun < 0.4)),
    )
    assert 0.4 < time.monotonic() - begun < 5
    assert isinstance(outcomes["dead"].error, TimeoutError)
    assert sorted(seen[:2]) == [("h0", True), ("h1", True)]
    assert seen[2] == ("dead", False)
    never.set()


def test_all_are_asked_at_the_same_time():
    everyone = threading.Barrier(40)
    outcomes = fan_out(lambda _: everyone.wait(10) >= 0, dict.fromkeys(map(str, range(40))), timeout_s=20)
    assert all(outcome.get() for outcome in outcomes.values())

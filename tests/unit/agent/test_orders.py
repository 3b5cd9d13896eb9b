"""Of two who give orders, the one with the higher epoch counts."""

import json

import pytest

from gangline.agent.supervise.part import Orders, outweighs


@pytest.fixture
def make(tmp_path):
    complaints = []

    def give(epoch, order):
        (tmp_path / f"order-{epoch}.json").write_text(json.dumps({"epoch": epoch, "order": order}))

    return Orders(tmp_path, epoch=1, complain=complaints.append), give, complaints


def test_without_an_order_there_is_none(make):
    orders, _, complaints = make
    assert (orders.read(), orders.epoch, complaints) == (None, 1, [])


def test_who_started_the_host_agent_may_give_orders_and_change_them(make):
    orders, give, _ = make
    give(1, "stop")
    assert orders.read() == "stop"
    give(1, "kill")
    assert orders.read() == "kill"


def test_who_takes_over_may_and_who_was_there_before_may_not_any_more(make):
    orders, give, complaints = make
    give(2, None)
    assert (orders.read(), orders.epoch) == (None, 2)
    give(1, "kill")
    assert orders.read() is None
    assert orders.read() is None
    assert complaints == ["refused: kill of epoch 1; epoch 2 is in charge"]
    give(2, "stop")
    assert orders.read() == "stop"


def test_an_order_that_was_valid_when_it_came_is_not_complained_of_later(make):
    orders, give, complaints = make
    give(1, "stop")
    assert orders.read() == "stop"
    give(3, None)
    assert orders.read() is None
    assert complaints == []


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": 7, "order": "kill"}', '{"epoch": 9, "order": "dance"}', "{"])
def test_what_is_no_order_is_none(make, tmp_path, text):
    orders, _, _ = make
    (tmp_path / "order-9.json").write_text(text)
    assert orders.read() is None


def test_a_folder_that_was_removed_is_no_order(make, tmp_path):
    orders, _, _ = make
    tmp_path.rmdir()
    assert orders.read() is None


@pytest.mark.parametrize("word", ["yield", "break", "stop", "kill"])
def test_there_are_four(make, word):
    orders, give, _ = make
    give(1, word)
    assert orders.read() == word


def test_one_that_ends_more_takes_the_place_of_one_that_ends_less():
    words = [None, "yield", "break", "stop", "kill"]
    assert [[outweighs(word, other) for other in words] for word in words] == [
        [False, False, False, False, False],
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, True, True, True, False],
    ]

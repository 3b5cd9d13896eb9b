"""Between joining and the first step nobody prints: what the ranks do then is told."""

from dataclasses import replace

from gangline.supervise.gang_view import FirstStep
from tests.unit.supervise.test_board import Clock, all_at, rank, request, status


def following(program="worker"):
    clock = Clock()
    return FirstStep(request(program), clock=clock), clock


def told(first_step, statuses):
    news = list(first_step.note(statuses))
    assert all(event == "beginning" for event, _ in news)
    return [details["what"] for _, details in news]


def test_each_thing_that_all_ranks_do_is_told_once():
    first_step, _ = following()
    assert told(first_step, all_at("joined")) == ["all 4 ranks load the model"]
    assert told(first_step, all_at("joined")) == []
    assert told(first_step, all_at("evaluate")) == ["all 4 ranks evaluate the model before the first step"]
    assert told(first_step, all_at("compile")) == ["all 4 ranks compile the layers of the model"]
    assert told(first_step, all_at("data")) == ["all 4 ranks work on the first step"]
    assert first_step.done
    assert told(first_step, all_at("evaluate")) == []  # the one after some steps has a line of its own


def test_those_that_are_behind_are_named():
    first_step, _ = following()
    told(first_step, all_at("joined"))
    late = [status("pc1", rank(0, "evaluate")), status("pc2", rank(1, "joined"), rank(2, "joined"))]
    assert told(first_step, [*late, status("pc3", rank(3, "evaluate"))]) == []
    late[1] = status("pc2", rank(1, "evaluate"), rank(2, "data"))
    assert told(first_step, late) == [
        "rank 0 on pc1, rank 1 on pc2 and rank 3 on pc3 evaluate the model before the first step"
    ]


def test_what_lasts_is_told_again_at_longer_and_longer_intervals():
    first_step, clock = following()
    told(first_step, all_at("joined"))
    said = {}
    for second in range(1, 130):
        clock.now = float(second)
        if what := told(first_step, all_at("joined")):
            (said[second],) = what
    assert list(said) == [15, 30, 60, 120]
    assert said[15] == "all 4 ranks still load the model after 15.0 s"
    assert said[60] == "all 4 ranks still load the model after 1 min 00 s"


def test_one_rank_alone():
    first_step, _ = following()
    assert told(first_step, [status("pc1", rank(0, "joined"))]) == ["the rank loads the model"]


def test_a_host_that_does_not_answer_is_remembered_as_it_was():
    first_step, _ = following()
    told(first_step, all_at("joined"))
    gone = [replace(each, phase="unreachable", signs=None) if each.host == "pc3" else each for each in all_at("data")]
    assert told(first_step, gone) == []
    assert not first_step.done
    assert told(first_step, all_at("data")) == ["all 4 ranks work on the first step"]


def test_nothing_is_told_of_the_users_own_program_or_by_host_agents_that_say_nothing():
    first_step, _ = following("command")
    assert first_step.done
    assert told(first_step, all_at("joined")) == []
    silent, _ = following()
    assert told(silent, [replace(each, signs=None) for each in all_at("joined")]) == []

"""Who is behind, at which stage, and for how long; in a sentence."""

from dataclasses import replace

import pytest

from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, RankSigns, StartSigns, WorkSigns
from gangline.supervise.startup import STAGES, StartBoard, StartLimits, sentence

PLACES = {"10.77.0.10": "pc1", "10.77.0.11": "pc2", "10.77.0.12": "pc3"}
RANKS = {"pc1": (0,), "pc2": (1, 2), "pc3": (3,)}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def request(program="worker"):
    parts = [
        HostRequest(host=host, folder=f"/{host}", rank_files="/", argv=(), env={}, ranks=ranks, program=program)
        for host, ranks in RANKS.items()
    ]
    return LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))


def rank(number, phase=None, torch=None, met=False, idle_s=None):
    torch = torch if torch is not None else phase is not None
    return RankSigns(rank=number, phase=phase, has_torch=torch, has_met=met, work=work(idle_s))


def work(idle_s):
    return None if idle_s is None else WorkSigns(idle_s=idle_s, cpu_s=12.0, read_bytes=300 << 20)


def status(host, *ranks, launcher=True, met=True, waits_for=(), idle_s=None, load=None, **how):
    signs = StartSigns(launcher=launcher, met=met, ranks=ranks, waits_for=waits_for, work=work(idle_s), load=load)
    return HostStatus(**{"host": host, "phase": "running", "signs": signs, **how})


def all_at(phase):
    return [status(host, *(rank(number, phase) for number in numbers)) for host, numbers in RANKS.items()]


def said(board, probes=None):
    return sentence(board, meet="pc1 at 10.77.0.10, port 29500", places=PLACES, probes=probes or {})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def board(clock):
    return StartBoard(request(), clock=clock)


def test_a_host_goes_through_the_stages_and_the_time_of_each_is_kept(board, clock):
    seen = []
    for now, host in (
        (0.0, HostStatus(host="pc2", phase="unreachable")),
        (1.0, HostStatus(host="pc2", phase="starting")),
        (2.0, status("pc2", launcher=False, met=False)),
        (3.0, status("pc2", met=False)),
        (4.0, status("pc2")),
        (5.0, status("pc2", rank(1))),
        (6.0, status("pc2", rank(1), rank(2))),
        (7.0, status("pc2", rank(1, "joining"), rank(2, None))),
        (8.0, status("pc2", rank(1, "joining"), rank(2, "joining"))),
        (9.0, status("pc2", rank(1, "joined"), rank(2, "data"))),
    ):
        clock.now = now
        board.note([host])
        seen.append(board.rows["pc2"].stage)
    assert seen == ["ssh", "agent", "launcher", "port", "python", "python", "torch", "torch", "joined", None]
    assert list(board.rows["pc2"].reached.values()) == [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0]


def test_who_has_come_far_has_come_through_all_that_is_before(board):
    board.note([status("pc1", rank(0, "joined"), launcher=False, met=False)])
    assert list(board.rows["pc1"].reached) == list(STAGES)


def test_the_slowest_host_is_the_stage_of_the_gang(board, clock):
    board.note([status("pc1"), status("pc2", met=False), status("pc3")])
    assert (board.stage, [row.host for row in board.lagging]) == ("port", ["pc2"])
    clock.now = 4.0
    board.note([status("pc2")])
    assert (board.stage, len(board.lagging), board.stage_seconds) == ("python", 3, 0.0)
    board.note(all_at("joined"))
    assert (board.stage, board.lagging) == (None, [])


def test_a_sentence_comes_after_a_quarter_of_a_minute_and_not_when_all_is_well(board, clock):
    assert not board.is_late()
    clock.now = 15.0
    assert board.is_late()
    board.note(all_at("joined"))
    assert not board.is_late()


CASES = {
    "silence": (
        [status("pc1", met=False), HostStatus(host="pc2", phase="unreachable"), status("pc3", met=False)],
        "pc2 does not answer",
    ),
    "host-agent": ([HostStatus(host="pc2", phase="starting")], "the gangline agent on pc2 has not started"),
    "import of the launcher": (
        [status("pc2", launcher=False, met=False), status("pc3", launcher=False, met=False)],
        "torchrun on pc2 and pc3 has not imported torch yet",
    ),
    "port dropped": (
        [status("pc3", met=False, waits_for=("10.77.0.10:29500",))],
        "torchrun on pc3 is not connected to pc1 at 10.77.0.10, port 29500 yet; pc3 gets no answer from pc1 (10.77.0.10, port 29500)",
    ),
    "import of a rank": ([status("pc2", rank(1, "joining"), rank(2))], "rank 2 on pc2 has not finished importing"),
    "import of many": (
        [status("pc2", rank(1), rank(2)), status("pc3", rank(3))],
        "ranks 1, 2 on pc2 and rank 3 on pc3 have not finished importing",
    ),
    "data ports dropped": (
        [
            *all_at("joining")[:1],
            status("pc2", rank(1, "joining"), rank(2, "joining"), waits_for=("10.77.0.10:51116",)),
            status("pc3", rank(3, "joining"), waits_for=("10.77.0.10:51116", "10.9.9.9:5")),
        ],
        "pc2 gets no answer from pc1 (10.77.0.10, port 51116); pc3 gets no answer from pc1 (10.77.0.10, port 51116), 10.9.9.9:5",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_names_who_is_behind_and_what_is_seen(board, clock, name):
    statuses, words = CASES[name]
    board.note([each for each in all_at("joining") if each.host not in {status.host for status in statuses}])
    board.note(statuses)
    clock.now = 15.0
    board.note(statuses)
    assert words in said(board)
    assert said(board).startswith("0 of 4 ranks have joined after 15 s; ")


def test_a_host_that_has_gone_is_told_before_what_others_have_not_reached(board, clock):
    board.note([status("pc1"), status("pc2"), status("pc3", met=False)])
    for now in (20.0, 25.0):
        clock.now = now
        board.note([HostStatus(host="pc2", phase="unreachable")])
    assert "; pc2 does not answer; torchrun on pc3 is not connected to" in said(board)
    for now in (26.0, 31.0):
        clock.now = now
        board.note([HostStatus(host="pc3", phase="unreachable")])
    assert said(board).endswith("; pc2 and pc3 do not answer")
    board.note([status("pc2"), status("pc3", met=False)])
    assert "answer" not in said(board)


def test_a_connection_that_is_soon_back_is_not_told(board, clock):
    board.note([status("pc1"), status("pc2"), status("pc3", met=False)])
    for now in (20.0, 24.9):
        clock.now = now
        board.note([HostStatus(host="pc2", phase="unreachable")])
        assert "answer" not in said(board)
    board.note([status("pc2")])
    clock.now = 26.0
    board.note([HostStatus(host="pc2", phase="unreachable")])
    assert "answer" not in said(board)


def test_a_probe_has_the_last_word(board, clock):
    board.note([status("pc1"), status("pc2"), status("pc3", met=False)])
    assert said(board, {"pc3": "a connection is refused"}).endswith("; a connection is refused")


@pytest.mark.parametrize(
    ("statuses", "limit_s"),
    [
        ([status("pc3", launcher=False, met=False)], 300.0),
        ([status("pc3", met=False)], 90.0),
        ([status("pc3", rank(3))], 300.0),
        ([status("pc3", rank(3, "joining"))], 90.0),
    ],
)
def test_imports_may_take_long_and_everything_else_may_not(board, clock, statuses, limit_s):
    board.note([*all_at("joining")[:2], *statuses])
    clock.now = limit_s
    assert not board.is_overdue()
    clock.now = limit_s + 1
    assert board.is_overdue()


def test_the_limit_counts_from_when_the_last_host_got_there(board, clock):
    board.note([*all_at("joining")[:2], status("pc3", rank(3))])
    clock.now = 200.0
    board.note(all_at("joining"))
    clock.now = 280.0
    assert not board.is_overdue()
    clock.now = 291.0
    assert board.is_overdue()


def test_a_program_that_is_not_ours_has_joined_once_it_is_connected_and_is_not_given_up(clock):
    board = StartBoard(request("command"), clock=clock, limits=StartLimits(import_s=1, stage_s=1))
    board.note([status(host, *(rank(number, torch=True) for number in numbers)) for host, numbers in RANKS.items()])
    assert board.stage == "joined"
    clock.now = 900.0
    assert not board.is_overdue()
    board.note(
        [status(host, *(rank(number, torch=True, met=True) for number in numbers)) for host, numbers in RANKS.items()]
    )
    assert board.stage is None


def test_launchers_that_wait_for_one_another_are_not_said_to_do_nothing(board, clock):
    board.note([status("pc1", idle_s=60.0), status("pc2", idle_s=60.0), status("pc3", idle_s=0.0)])
    clock.now = 100.0
    board.note([status("pc1", idle_s=160.0), status("pc2", idle_s=160.0), status("pc3", idle_s=0.0)])
    assert said(board).endswith(
        "the ranks of pc1, pc2 and pc3 have not started yet; pc3 works on it: 12 s of processor time, 300 MiB read"
    )
    assert not board.is_overdue()
    board.note([status("pc3", idle_s=95.0)])
    assert board.is_overdue()


def test_whether_a_program_that_is_not_ours_works_or_may_sleep_is_not_known(clock):
    board = StartBoard(request("command"), clock=clock)
    board.note(
        [
            status("pc1", rank(0, torch=True, met=True)),
            status("pc2", rank(1, torch=True, met=True), rank(2, torch=False, idle_s=60.0)),
            status("pc3", rank(3, torch=True, met=True)),
        ]
    )
    clock.now = 60.0
    assert said(board) == "3 of 4 ranks have joined after 60 s; rank 2 on pc2 has not imported torch"


def test_a_program_that_is_not_ours_may_turn_out_not_to_have_joined(clock):
    board = StartBoard(request("command"), clock=clock)
    everybody = [
        status(host, *(rank(each, torch=True, met=True) for each in numbers)) for host, numbers in RANKS.items()
    ]
    stuck = status("pc3", rank(3, torch=True), waits_for=("10.77.0.10:51116",))
    seen = []
    for now, statuses in ((8.0, everybody), (300.0, [*everybody[:2], stuck]), (310.0, everybody)):
        clock.now = now
        board.note(statuses)
        seen.append((board.stage, board.is_late()))
    assert seen == [(None, False), ("joined", True), (None, False)]
    board.note([*everybody[:2], stuck])
    assert said(board).endswith("; rank 3 on pc3 has not joined; pc3 gets no answer from pc1 (10.77.0.10, port 51116)")
    board.note([HostStatus(host="pc3", phase="unreachable", why="no answer")])
    assert board.stage == "joined"


def test_a_program_that_is_not_ours_is_given_up_if_its_launchers_do_not_meet(clock):
    board = StartBoard(request("command"), clock=clock)
    board.note([status("pc1"), status("pc2"), status("pc3", met=False)])
    clock.now = 91.0
    assert board.is_overdue()


IMPORTING = (
    status("pc1", rank(0, "joining", idle_s=0.0)),
    status("pc2", rank(1, "joining", idle_s=0.0), rank(2, "importing", torch=False, idle_s=1.5)),
)


def test_an_import_that_works_is_waited_for_and_one_that_sleeps_is_named_and_given_up(board, clock):
    board.note([*IMPORTING, status("pc3", rank(3, idle_s=2.0))])
    clock.now = 900.0
    board.note([*IMPORTING, status("pc3", rank(3, idle_s=2.0))])
    assert not board.is_overdue()
    assert said(board).endswith(
        "; pc2 works on it: 12 s of processor time, 300 MiB read; pc3 works on it: 12 s of processor time, 300 MiB read"
    )
    clock.now = 960.0
    board.note([*IMPORTING, status("pc3", rank(3, idle_s=62.0))])
    assert not board.is_overdue()
    assert said(board).endswith("; rank 3 on pc3 has done nothing for 62 s")
    clock.now = 990.0
    board.note([*IMPORTING, status("pc3", rank(3, idle_s=92.0))])
    assert board.is_overdue()


def test_nobody_works_for_ever(board, clock):
    board.note([*IMPORTING, status("pc3", rank(3, idle_s=0.0))])
    clock.now = 3601.0
    assert board.is_overdue()


def test_a_rank_that_works_does_not_hide_another_one_that_sleeps(board, clock):
    clock.now = 200.0
    stuck = status("pc2", rank(1, "importing", torch=False, idle_s=0.0), rank(2, torch=False, idle_s=120.0))
    board.note([IMPORTING[0], stuck, status("pc3", rank(3, "joining", idle_s=0.0))])
    clock.now = 300.0
    board.note([stuck])
    assert said(board).endswith("; rank 2 on pc2 has done nothing for 120 s")
    assert board.is_overdue()


def test_the_limits_grow_with_the_load(board, clock):
    busy = [replace(each, signs=replace(each.signs, load=3.0)) for each in IMPORTING]
    board.note([*busy, status("pc3", rank(3, idle_s=100.0))])
    clock.now = 200.0
    board.note([*busy, status("pc3", rank(3, idle_s=200.0))])
    assert not board.is_overdue()
    assert "pc2: busy, 3.0 processes per core want to run" in said(board)
    clock.now = 280.0
    board.note([*busy, status("pc3", rank(3, idle_s=280.0))])
    assert board.is_overdue()


def test_ranks_that_join_are_given_up_only_when_none_of_them_works(board, clock):
    board.note([status("pc1", rank(0, "joining")), status("pc2", rank(1, "joining"), rank(2, "joining"))])
    for now, idle_s, is_overdue in ((200.0, 0.0, False), (300.0, 91.0, True)):
        clock.now = now
        board.note(
            [
                status("pc1", rank(0, "joining", idle_s=150.0)),
                status("pc2", rank(1, "joining", idle_s=150.0), rank(2, "joining", idle_s=150.0)),
                status("pc3", rank(3, "joining", idle_s=idle_s)),
            ]
        )
        assert board.is_overdue() == (is_overdue and now > 290)


def test_the_port_is_the_heads_so_nobody_else_is_named_before_it_is_open(board, clock):
    board.note([status("pc1", met=False, idle_s=1.0), status("pc2", met=False, idle_s=80.0), status("pc3", met=False)])
    clock.now = 200.0
    board.note([status("pc1", met=False, idle_s=1.0), status("pc2", met=False, idle_s=280.0)])
    assert said(board) == (
        "0 of 4 ranks have joined after 200 s; torchrun on pc1 has not opened the port where the launchers meet yet; "
        "pc1 works on it: 12 s of processor time, 300 MiB read"
    )
    assert not board.is_overdue()


def test_what_a_host_agent_said_long_ago_of_work_does_not_count(board, clock):
    for now in (0.0, 10.0, 400.0):
        clock.now = now
        board.note([*IMPORTING, status("pc3", rank(3, idle_s=0.0), beat=7)])
    assert board.rows["pc3"].idle_s is None
    assert board.is_overdue()


def test_where_nobody_tells_of_stages_there_is_nothing_to_wait_for(board):
    board.note([HostStatus(host=host, phase="running") for host in RANKS])
    assert (board.stage, board.is_told) == (None, False)


def test_the_file_says_all(board, clock):
    clock.now = 3.04
    board.note(
        [status("pc1", rank(0, "joined")), status("pc2", met=False, waits_for=("10.77.0.10:29500",)), status("pc3")]
    )
    data = board.to_json(sentence="words")
    assert (data["done"], data["seconds"], data["ranks"], data["joined"], data["sentence"]) == (
        False,
        3.0,
        4,
        1,
        "words",
    )
    assert [row["joined"] for row in data["hosts"]] == [1, 0, 0]
    assert data["hosts"][1]["stages"] == {
        "ssh": 3.0, "agent": 3.0, "launcher": 3.0, "port": None, "python": None, "torch": None, "joined": None,
    }  # fmt: skip
    assert data["hosts"][1]["waits_for"] == ["10.77.0.10:29500"]

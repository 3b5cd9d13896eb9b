"""The screen of `gangline top`, out of records: what is drawn at every width, and what is never claimed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.launch.backend import HostStatus, RankSigns, StartSigns
from gangline.report.dashboard import (
    Look,
    WatchedHost,
    WatchedRun,
    WatchedState,
    bar,
    ranks_of,
    screen,
    screen_json,
    sparkline,
    text_of,
)
from gangline.report.host_samples import SampleTail, parse_samples
from gangline.runs.layout import RunLayout
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState, iso
from tests.fakes.transport import FakeTransport

NOW = 1_795_000_000.0
SCREENS = Path(__file__).parent / "screens"
CARD = {"index": 0, "name": "RTX 4070", "uuid": "GPU-1", "simulated": True}
COLUMNS = [
    *("cpu_percent", "memory_bytes", "memory_percent", "net/eth0/rx_bytes_per_s", "net/eth0/tx_bytes_per_s"),
    *("gpu/0/utilization_percent", "gpu/0/memory_bytes", "gpu/0/memory_percent", "gpu/0/temperature_c"),
    *("gpu/0/throttled_percent", "gpu/0/ecc_uncorrected"),
]


def sample(seconds_ago, *values):
    return [NOW - seconds_ago, 1, list(values)]


def samples(*lines, host="pc2", cards=(CARD,)):
    head = [{"samples": host, "interval_s": 2.0, "cards": list(cards)}, {"columns": COLUMNS}]
    return parse_samples(host, [json.dumps(line).encode() for line in [*head, *lines]])


def event(kind, seconds_ago, **more):
    return {"event": kind, "time": NOW - seconds_ago, "gpu": 0, "simulated": True, **more}


def watched(name, found, *, heard=NOW - 1):
    return WatchedHost(name=name, samples=found, heard=heard)


def sign(rank, phase, *, step=40, collectives=80):
    return RankSigns(
        rank=rank, phase=phase, has_torch=True, has_met=True, step=step, collectives=collectives, same_s=3.0
    )


def status(host, *signs):
    return HostStatus(host=host, phase="running", signs=StartSigns(launcher=True, met=True, ranks=signs))


def step(number, loss):
    ranks = [
        {"rank": 0, "host": "pc1", "micro_batches": 3, "compute_s": 0.2, "wait_others_s": 0.4},
        {"rank": 1, "host": "pc2", "micro_batches": 1, "compute_s": 0.6, "wait_others_s": 0.0},
    ]
    figures = {"loss": loss, "tokens_per_s": 4000.0, "step_s": 0.6, "ranks": ranks}
    return {"kind": "step", "step": number, "steps": 100, "time": iso(NOW - 50 + number), **figures}


def a_run(**more):
    state = RunState(name="tiny", phase="running", attempt=2, supervisor=ProcessId.current())
    run = WatchedRun(record=RunRecord(id="calm-otter-7", state=state), **more)
    for number in range(1, 41):
        run.history.add(step(number, 4.0 - number / 20))
    run.history.add({"kind": "evaluation", "step": 20, "loss": 3.1})
    return run


def a_screen():
    """Two hosts, one with a card that is hot and that somebody else uses, and a rank that waits for another one."""
    hot = samples(
        *(
            sample(20 - 2 * each, 50 + 4 * each, 8 << 30, 50, 1.25e6, 0, 90, 10 << 30, 83, 91, 100, 2)
            for each in range(10)
        ),
        event("throttled", 12.0, temperature_c=91.0, reasons=["temperature (driver)"]),
        event("foreign", 8.0, processes=[{"pid": 7, "name": "game"}]),
    )
    cool = samples(sample(1, 20, 4 << 30, 25, 2.5e6, 1.25e6), host="pc1", cards=())
    run = a_run(
        events=[{"kind": "event", "event": "committed", "step": 30, "time": iso(NOW - 20)}],
        statuses=[status("pc1", sign(0, "exchange")), status("pc2", sign(1, "compute", collectives=79))],
        findings=[{"id": "E-GPU-05", "severity": "warn", "hosts": ["pc2"], "title": "a GPU is hot"}],
    )
    return WatchedState(now=NOW, hosts=[watched("pc1", cool), watched("pc2", hot)], run=run)


def lines(seen, width=100, *, plain=False):
    return [text_of(line) for line in screen(seen, Look(width=width, plain=plain))]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_screen_is_as_kept(width):
    shown = "\n".join(lines(a_screen(), width)) + "\n"
    assert shown == (SCREENS / f"top-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 40, 59, 80, 120, 200, 300])
@pytest.mark.parametrize("plain", [False, True])
def test_no_line_is_wider_than_the_terminal(width, plain):
    shown = lines(a_screen(), width, plain=plain)
    assert max(map(len, shown)) <= width
    assert not plain or all(line.isascii() for line in shown)
    assert any("throttled" in line for line in shown)
    assert "waits for rank 1 on pc2" in " ".join(" ".join(shown).split()) or width > 40


def test_a_rank_waits_for_the_one_that_has_not_entered_its_collective():
    run = a_run(statuses=[status("pc1", sign(0, "exchange")), status("pc2", sign(1, "compute", collectives=79))])
    assert [each.waits_for for each in ranks_of(run)] == ["rank 1 on pc2", ""]


def test_nobody_waits_for_a_rank_that_is_as_far():
    run = a_run(statuses=[status("pc1", sign(0, "exchange")), status("pc2", sign(1, "exchange"))])
    assert [each.waits_for for each in ranks_of(run)] == ["", ""]


def test_the_phase_of_a_host_that_does_not_answer_is_not_guessed():
    run = a_run(statuses=[status("pc1", sign(0, "exchange")), HostStatus(host="pc2", phase="unreachable")])
    assert [(each.phase, each.waits_for) for each in ranks_of(run)] == [("exchange", ""), ("-", "")]


def test_old_samples_have_their_age():
    found = samples(sample(200, 50))
    assert any("pc2  last heard 3 min 20 s ago" in line for line in lines(WatchedState(now=NOW, hosts=[
        watched("pc2", found, heard=NOW - 200)
    ])))  # fmt: skip


def test_an_age_is_whole_on_a_narrow_terminal():
    shown = lines(WatchedState(now=NOW, hosts=[watched("pc2", samples(sample(200, 50)), heard=NOW - 200)]), 20)
    assert "last heard 3 min 20 s ago" in "".join(shown)


def test_a_host_without_samples_says_so_and_has_no_figure():
    shown = lines(WatchedState(now=NOW, hosts=[WatchedHost(name="pc9")]))
    assert shown[-1] == "pc9  no samples"
    assert shown[1] == "1 host  what 1 host has is not known"


def test_a_dead_supervisor_is_named_with_the_way_out():
    seen = a_screen()
    seen.run.record = replace(seen.run.record, lost=True)
    shown = "\n".join(lines(seen))
    assert "calm-otter-7  lost" in shown
    assert "gangline attach calm-otter-7" in shown
    assert "eta" not in shown


def test_a_run_on_a_host_that_is_off_is_doubted():
    seen = a_screen()
    seen.run.record = replace(seen.run.record, silent="pc1: does not answer", silent_host="pc1")
    shown = lines(seen)
    assert shown[0].startswith("calm-otter-7  running?")
    assert "pc1: does not answer" in shown
    assert not any("eta" in line for line in shown)


def test_a_damaged_state_is_shown_and_no_error():
    seen = WatchedState(now=NOW, hosts=[], run=WatchedRun(record=RunRecord(id="calm-otter-7", state=None)))
    assert lines(seen)[0] == "calm-otter-7  unknown"


def test_programs_get_the_same():
    told = json.loads(json.dumps(screen_json(a_screen())))
    assert (told["run"], told["phase"], told["last_step"]["step"]) == ("calm-otter-7", "running", 40)
    assert told["ranks"][0]["waits_for"] == "rank 1 on pc2"
    assert told["hosts"][1]["figures"]["gpu/0/temperature_c"] == 91
    assert [each["event"] for each in told["hosts"][1]["events"]] == ["throttled", "foreign"]


def test_text_of_a_host_is_no_escape_sequence():
    card = {**CARD, "name": "\x1b[31mRTX\x1b]0;title\x07"}
    shown = lines(WatchedState(now=NOW, hosts=[watched("pc2", samples(sample(1, 5), cards=(card,)))]))
    assert not any("\x1b" in line or "title" in line for line in shown)


def test_bars_and_sparklines():
    assert (bar(50, 4), bar(200, 2), bar(50, 4, plain=True)) == ("██  ", "██", "##..")
    assert (sparkline([0, None, 100], 5, most=100), sparkline([0, 100], 2, most=100, plain=True)) == ("  ▁ █", "_@")


# The file of samples, read again and again.


def file_of(host, *rows):
    layout = RunLayout(Path("/work"), "calm-otter-7")
    path = layout.samples(host.host)
    host.files[path] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return path


def test_only_what_is_new_is_read_and_a_file_written_anew_is_read_whole():
    host = FakeTransport("pc1")
    head, first, second = {"samples": "pc1", "interval_s": 2.0, "cards": []}, sample(9, 10), sample(7, 20)
    path = file_of(host, head, {"columns": COLUMNS}, first)
    tail = SampleTail("pc1", host, path)
    assert len(tail.look().rows) == 1
    host.files[path] += json.dumps(second).encode() + b"\n[17"
    assert [means["cpu_percent"] for _, _, means, _ in tail.look().rows] == [10, 20]
    file_of(host, head, {"columns": ["memory_bytes", "cpu_percent"]}, [NOW, 2, [1, 15], [1, 20]], [NOW, 1, [1, 30]])
    assert [means["cpu_percent"] for _, _, means, _ in tail.look().rows] == [15, 30]


def test_a_host_without_a_file_has_no_samples_yet():
    host = FakeTransport("pc1")
    tail = SampleTail("pc1", host, RunLayout(Path("/work"), "calm-otter-7").samples("pc1"))
    assert tail.look().rows == []
    file_of(host, {"columns": COLUMNS}, sample(1, 3))
    assert len(tail.look().rows) == 1

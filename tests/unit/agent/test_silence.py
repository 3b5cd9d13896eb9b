"""A log that does not grow is told of in seconds, with its last line; of our own worker nothing is."""

import pytest

from gangline.agent.supervise.processes import Process
from gangline.agent.supervise.ranks import LINE_AFTER_S, LINE_LETTERS, Ranks, Silence


class Host:
    """Ranks that print when a test says so, and a clock that it moves."""

    def __init__(self, folder, program="command"):
        self.folder = folder
        self.now = 1000.0
        self.ranks = Ranks(folder, {4, 5})
        self.silence = Silence({"program": program}, self.ranks, clock=lambda: self.now)

    def starts(self, rank):
        self.ranks.processes[rank] = Process(1, 1, 0, "R")
        self.prints(rank, "")

    def prints(self, rank, text):
        with (self.folder / f"rank-{rank}.log").open("a") as log:
            log.write(text)

    def after(self, seconds):
        self.now += seconds
        self.silence.look()
        return self.silence.seen


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_seconds_without_output_are_whole_and_by_its_own_clock(host):
    host.starts(4)
    assert host.after(0)["4"] == {"silent_s": 0, "age_s": 0, "printed": False, "line": ""}
    host.prints(4, "step 1\n")
    assert host.after(1.5)["4"] == {"silent_s": 0, "age_s": 1, "printed": True, "line": ""}
    row = host.after(90.7)["4"]
    assert (row["silent_s"], row["age_s"]) == (90, 92)
    host.prints(4, ".")
    assert host.after(1)["4"]["silent_s"] == 0


def test_a_step_of_its_optimizer_is_a_sign_of_progress(host):
    host.starts(4)
    host.after(60)
    (host.folder / "rank-4.count").write_text("1")
    assert host.after(1)["4"]["silent_s"] == 0


def test_a_step_that_a_script_reports_is_a_sign_of_progress(host):
    host.starts(4)
    host.prints(4, "begins\n")
    host.after(1)
    assert host.after(60)["4"]["silent_s"] == 60
    (host.folder / "rank-4.step").write_text("1\n")
    assert host.after(1)["4"]["silent_s"] == 0
    row = host.after(60)["4"]
    assert (row["silent_s"], row["printed"], row["line"]) == (60, True, "begins")


def test_every_rank_has_its_own_row_from_when_it_runs(host):
    host.starts(5)
    host.after(10)
    host.starts(4)
    host.after(0)
    assert {rank: row["age_s"] for rank, row in host.after(3).items()} == {"4": 3, "5": 3}


def test_a_rank_that_never_printed_says_so(host):
    host.starts(4)
    host.after(0)
    row = host.after(60)["4"]
    assert (row["silent_s"], row["printed"], row["line"]) == (60, False, "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("step 1\nstep 2\n", "step 2"),
        ("step 1\nwaits", "waits"),
        ("done\n\n  \n", "done"),
        ("\r 10%|#\r 20%|##", "20%|##"),
        ("\n\n", ""),
        ("x" * 9000, "x" * LINE_LETTERS),
    ],
)
def test_the_last_line_is_read_once_it_is_silent(host, text, line):
    host.starts(4)
    host.after(0)
    host.prints(4, text)
    assert host.after(1)["4"]["line"] == ""
    assert host.after(LINE_AFTER_S)["4"]["line"] == line


def test_the_last_line_goes_with_the_next_output(host):
    host.starts(4)
    host.prints(4, "step 1\n")
    host.after(0)
    assert host.after(60)["4"]["line"] == "step 1"
    host.prints(4, "step 2\n")
    assert host.after(1)["4"]["line"] == ""


def test_a_log_that_was_taken_away_is_no_output_and_no_error(host):
    host.starts(4)
    host.prints(4, "step 1\n")
    host.after(0)
    (host.folder / "rank-4.log").unlink()
    row = host.after(60)["4"]
    assert (row["silent_s"], row["printed"]) == (60, True)


def test_a_log_that_was_emptied_has_changed_and_goes_on(host):
    host.starts(4)
    host.prints(4, "step 1\n")
    host.after(0)
    (host.folder / "rank-4.log").write_text("")
    assert host.after(30)["4"]["silent_s"] == 0
    assert host.after(30)["4"]["silent_s"] == 30


def test_ranks_of_our_worker_are_not_looked_at(tmp_path):
    host = Host(tmp_path, program="worker")
    host.starts(4)
    assert host.after(60) == {}

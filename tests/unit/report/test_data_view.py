"""The page of `gangline data`."""

import dataclasses

import pytest

from gangline.report.data_view import marks, preview_lines, summary_lines
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob

JOB = Job(
    name="j",
    model=ModelJob(path="/m"),
    data=DataJob(train=SourceJob(files=("/rows.jsonl",)), format="chat", sequence_length=64),
    batch=4,
    micro_batch=1,
    epochs=2.0,
)
SEEN = {
    "samples": [
        {
            "place": "rows.jsonl:1",
            "parts": [["<user>two\x1b[31m lines\n", False], ["yes\nno<end>", True]],
            "tokens": 9,
            "learned": 4,
            "left_out": 3,
        }
    ],
    "rows": 1000,
    "skipped": 1,
    "bad_rows": ["rows.jsonl:7: no assistant message"],
    "fits": "",
    "truncated": 2,
    "dropped": 1,
    "too_long": [["rows.jsonl:9", 120], ["rows.jsonl:11", 80]],
    "notes": {"the template leaves out tool calls": 5},
    "whole": True,
    "read_bytes": 500,
    "total_bytes": 1000,
    "percentiles": [[0, 3], [50, 20], [99, 70], [100, 120]],
    "bars": [[3, 62, 900], [63, 122, 100]],
    "num_samples": 300,
    "tokens": 18000,
    "learned_tokens": 4500,
    "steps": 150,
}


def test_learned_words_stand_in_brackets_line_by_line_where_there_is_no_colour():
    lines = list(preview_lines(SEEN, JOB, around=marks(colour=False, plain=False)))
    assert lines[:4] == [
        "── rows.jsonl:1: 9 tokens, 4 learned, 3 more cut off",
        "<user>two lines",
        "⟦yes⟧",
        "⟦no<end>⟧",
    ]
    plain = "\n".join(preview_lines(SEEN, JOB, around=marks(colour=False, plain=True)))
    assert "{{yes}}\n{{no<end>}}" in plain


def test_colour_is_ours_and_no_control_sequence_of_a_row_gets_through():
    page = "\n".join(preview_lines(SEEN, JOB, around=marks(colour=True, plain=False)))
    assert "\x1b[32myes\x1b[0m\n\x1b[32mno<end>\x1b[0m" in page
    assert "\x1b[31m" not in page


def test_lengths_counts_and_what_is_cut_left_out_or_unusable():
    page = "\n".join(preview_lines(SEEN, JOB, around=("<", ">")))
    assert "   3 to  62  ######################################## 900" in page
    assert "  63 to 122  #####                                    100" in page
    assert "shortest 3, median 20, 99 % 70, longest 120" in page
    assert "rows       1,000 (all rows), 18,000 tokens, 25% of them learned" in page
    assert "samples    300 of at most 64 tokens, packed; 150 steps of 4 in 2 epochs" in page
    assert "cut        2 rows longer than a sample" in page
    assert "rows.jsonl:9: 120 tokens" in page
    assert "dropped    1 row longer than a sample" in page
    assert "left out   5 rows: the template leaves out tool calls" in page
    assert "unusable   1 row, which stops the start:\n             rows.jsonl:7: no assistant message" in page


def test_the_rest_of_many_rows_is_estimated():
    page = "\n".join(summary_lines({**SEEN, "whole": False}, JOB))
    assert "1,000 (the first 50.0% of the rows)" in page
    assert "about 600 of at most 64 tokens, packed; about 300 steps of 4 in 2 epochs" in page


@pytest.mark.parametrize(("steps", "epochs", "said"), [(70, None, "150 steps of 4"), (None, 1.0, "in 1 epoch")])
def test_steps_as_the_job_says_them(steps, epochs, said):
    job = dataclasses.replace(JOB, steps=steps, epochs=epochs)
    (line,) = [line for line in summary_lines(SEEN, job) if line.startswith("samples")]
    assert line.endswith(said)


def test_a_length_that_the_plan_chooses_is_said_to_be_open():
    job = dataclasses.replace(JOB, open=("sequence_length",))
    assert "length     counted with samples of 64 tokens; gangline plan chooses the length" in summary_lines(SEEN, job)
    assert not any(line.startswith("length") for line in summary_lines(SEEN, JOB))


def test_no_row_at_all():
    none = {
        **SEEN,
        "samples": [],
        "rows": 0,
        "skipped": 0,
        "truncated": 0,
        "dropped": 0,
        "notes": {},
        "percentiles": [],
        "bars": [],
    }
    page = list(preview_lines({**none, "num_samples": 0, "tokens": 0, "steps": 0}, JOB, around=("<", ">")))
    assert page == [
        "rows       0 (all rows), 0 tokens",
        "samples    0 of at most 64 tokens, packed; 0 steps of 4 in 2 epochs",
    ]


def test_where_no_row_can_be_used_the_words_that_fit_are_told():
    page = list(preview_lines({**SEEN, "fits": "data.format: chat"}, JOB, around=("<", ">")))
    assert "fix        the rows fit data.format: chat" in page
    assert not any(line.startswith("fix") for line in preview_lines(SEEN, JOB, around=("<", ">")))

"""`gangline data`: what a look at rows says is what training then does."""

import json
import os
import subprocess
import sys

import pytest

from gangline.runs.job import LearnJob
from gangline.worker.data import NO_TARGET
from gangline.worker.data.preview import look
from tests.train.data.test_chat import FORGETFUL, PLAIN, TALK

ROWS = [{"prompt": "how many dogs?" * number, "completion": "six dogs " * 7} for number in range(1, 9)]


def learned_text(seen):
    return ["".join(text for text, learned in sample["parts"] if learned) for sample in seen["samples"]]


@pytest.mark.parametrize("data", [{"packing": True}, {"packing": False}, {"overlong": "fail", "skip_bad_rows": True}])
def test_the_counts_are_those_of_the_token_set(make_job, tokens_of, write_rows, data):
    file = write_rows(ROWS)
    how = {"format": "completion", "sequence_length": 64, "overlong": "truncate", **data}
    seen, tokens = look(make_job(file, **how), num_shown=3, seconds=60), tokens_of(file, **how)
    counts = tokens.manifest["counts"]
    assert (seen["rows"], seen["skipped"]) == (counts["source_rows"], counts["skipped_rows"])
    assert (seen["num_samples"], seen["tokens"]) == (counts["samples"], counts["tokens"])
    assert (seen["learned_tokens"], seen["truncated"]) == (counts["label_tokens"], counts["truncated_rows"])
    assert seen["bad_rows"] == tokens.manifest["bad_rows"]
    assert (seen["whole"], seen["tokenizer"]) == (True, "tokenizers")


def test_a_long_text_is_counted_as_it_is_split(make_job, tokens_of, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("two dogs pull and three dogs rest. " * 20_000)
    seen = look(make_job(file), num_shown=1, seconds=60)
    counts = tokens_of(file).manifest["counts"]
    assert (seen["num_samples"], seen["tokens"]) == (counts["samples"], counts["tokens"])
    assert seen["learned_tokens"] == counts["label_tokens"]


def test_samples_show_what_is_learned(make_job, make_model, tokens_of, write_rows, as_filed):
    folder, file = make_model(template=PLAIN), write_rows([{"messages": TALK}, {"messages": TALK[:2]}])
    how = {"format": "chat", "sequence_length": 256, "folder": folder, "packing": False}
    seen = look(make_job(file, **how, learn=LearnJob()), num_shown=5, seconds=60)
    assert learned_text(seen) == ["six dogs<|end|>\nhello back<|end|>\n", "six dogs<|end|>\n"]
    sets = as_filed(tokens_of(file, **how))
    assert [sample["tokens"] for sample in seen["samples"]] == [len(each.input_ids) for each in sets]
    assert [sample["learned"] for sample in seen["samples"]] == [sum(each.targets != NO_TARGET) for each in sets]
    assert [sample["place"].rpartition(":")[2] for sample in seen["samples"]] == ["1", "2"]


def test_what_is_cut_and_what_the_template_leaves_out_is_counted(make_job, make_model, write_rows):
    call = {"type": "function", "function": {"name": "sky", "arguments": {"city": "Oslo"}}}
    called = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *TALK[2:]]
    file = write_rows([{"messages": called}, {"messages": TALK * 40}])
    job = make_job(file, format="chat", sequence_length=64, overlong="truncate", folder=make_model(template=FORGETFUL))
    seen = look(job, num_shown=2, seconds=60)
    assert seen["notes"] == {"the template leaves out tool calls": 1}
    (place, length) = seen["too_long"][0]
    assert place.endswith("rows.jsonl:2")
    assert length == 64 + seen["samples"][1]["left_out"]
    assert seen["percentiles"][-1] == [100, length]
    assert sum(count for _, _, count in seen["bars"]) == 2


def test_a_look_ends_when_its_time_is_over(make_job, write_rows):
    seen = look(make_job(write_rows(ROWS * 400), format="completion"), num_shown=1, seconds=0.0)
    assert not seen["whole"]
    assert 0 < seen["rows"] < 400 * len(ROWS)


def test_a_look_takes_neither_torch_nor_transformers(make_job, make_model, write_rows, tmp_path):
    job = tmp_path / "job.json"
    make_job(write_rows([{"messages": TALK}]), format="chat", folder=make_model(template=PLAIN)).save(job)
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    program = f"{blocked}from gangline.worker.data.preview import preview_main; preview_main([{str(job)!r}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["num_samples"] == 1


def test_the_verb_shows_samples_and_counts(model, write_rows, tmp_path):
    job = tmp_path / "job.yaml"
    data = {"train": str(write_rows(ROWS)), "format": "completion", "sequence_length": 64}
    job.write_text(json.dumps({"model": {"path": str(model), "start": "random"}, "data": data, "batch": 2}))
    verb = [sys.executable, "-m", "gangline.cli.main", "data", str(job), "--rows", "1"]
    done = subprocess.run(verb, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "⟦six dogs six dogs" in done.stdout
    assert "rows       8 (all rows)" in done.stdout


def test_rows_of_another_format_are_told_the_words_that_fit_them(make_job, write_rows):
    job = make_job(write_rows(ROWS), format="text")
    assert look(job, num_shown=1, seconds=60)["fits"] == "data.format: completion or chat"
    one_good = make_job(write_rows([*ROWS, {"text": "words"}]), format="text")
    assert look(one_good, num_shown=1, seconds=60)["fits"] == ""

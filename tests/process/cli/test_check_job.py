"""The rows of a job on three hosts of this computer: `check JOB` tells them beside the hosts, `train` starts nothing
with rows that it cannot learn, and nothing is left.
"""

import importlib.util
import json
import sys

import pytest

from tests.bare_python import bare_python, run_verbs

if importlib.util.find_spec("transformers") is None:  # an import takes each of six processes a second
    pytest.skip("transformers is not installed", allow_module_level=True)
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.timeout(300)

JOB = "name: rows\nmodel: {path: ./model, start: random}\ndata: {train: rows.jsonl, format: completion}\nbatch: 8\nsteps: 10\n"
HOST = "  - {{name: {name}, transport: local, workdir: ./places/{name}, python: {python}}}\n"
CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
GOOD = {"prompt": "one two", "completion": "two one"}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python without the packages for training: the hosts' has them."""
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture
def folder(tmp_path):
    words = {"<end>": 0, "<unk>": 1, "one": 2, "two": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = tmp_path / "model"
    model.mkdir()
    made.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 1, "max_position_embeddings": 512}))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "job.yaml").write_text(JOB)
    hosts = "".join(HOST.format(name=name, python=sys.executable) for name in ("pc1", "pc2", "pc3"))
    (tmp_path / "cluster.yaml").write_text(f"hosts:\n{hosts}")
    return tmp_path


def write_rows(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers_of(python, folder, *verbs):
    return run_verbs(python, verbs, folder=folder, home=folder / "home")[0]


def test_rows_and_their_tokens_are_told_beside_three_hosts_and_nothing_is_left(python, folder):
    write_rows(folder, [GOOD] * 7 + [{"prompt": "one " * 600, "completion": "two"}])
    there = sorted(folder.iterdir())
    (code, page, err), (_, runs, _) = answers_of(python, folder, ["check", "job.yaml"], ["ps"])
    assert (code, "no runs" in runs) == (0, True), err
    assert [line.split()[0] for line in page.splitlines() if line.startswith("pc")] == ["pc1", "pc2", "pc3"]
    told = page.splitlines()[-4:]
    assert told[0] == "rows       data.train: 8 looked at, all can be used"
    assert told[1].startswith("length     sequence_length 512: 99 % of 8 rows have 602 tokens or fewer")
    assert told[2].startswith("longer     1 of 8 rows have more than 512 tokens and are truncated")
    assert told[3].startswith("dropped    1 of these")
    assert sorted(set(folder.iterdir()) - {folder / "home"}) == there


def test_a_row_that_cannot_be_used_is_named_the_hosts_are_still_told_and_the_exit_code_is_2(python, folder):
    write_rows(folder, [GOOD, {"prompt": "one", "completion": None}])
    (code, page, err), (as_json_code, page_json, _), (_, runs, _) = answers_of(
        python, folder, ["check", "job.yaml"], ["check", "job.yaml", "--json"], ["ps"]
    )
    assert (code, as_json_code, "no runs" in runs) == (2, 2, True)
    assert "rows.jsonl:2: 'completion' is null" in err
    assert all(f"\n{name} " in f"\n{page}" for name in ("pc1", "pc2", "pc3"))
    answer = json.loads(page_json)
    assert [host["host"] for host in answer["inventory"]["hosts"]] == ["pc1", "pc2", "pc3"]
    (error,) = answer["rows"]["errors"]
    assert "rows.jsonl:2: 'completion' is null" in error["what"]
    assert not (folder / "places").exists()


SHOWN = {"role": "user", "content": [{"type": "image"}]}
TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": TALK, "images": ["a.png"]}, "'images' belongs to the conversation; gangline trains on text"),
        (
            {"messages": [SHOWN, {**TALK[1], "content": [{"type": "text", "text": "two"}]}]},
            "a part of the type 'image'; gangline trains on text",
        ),
        ({"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]}, "a row of preferences ('chosen', 'rejected')"),
    ],
)
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_images_and_preferences_are_refused_by_name_and_leave_no_run(python, folder, row, reason, file):
    (folder / "job.yaml").write_text(JOB.replace("completion", "chat").replace("rows.jsonl", file))
    write_rows(folder, [row] * 3)
    if file.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), folder / file)
    (code, _, err), (_, runs, _) = answers_of(python, folder, ["train", "job.yaml"], ["ps"])
    assert (code, "no runs" in runs) == (2, True), err
    assert reason in err
    assert not (folder / "places").exists()

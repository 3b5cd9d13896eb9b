"""Rows from text, JSON lines, parquet and the hub; and every way in which they can be off."""

import csv
import gzip
import json
import random

import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from transformers import AutoTokenizer

from gangline.errors import DataError
from gangline.row_files import PIECE_CHARS, ReadPosition, SourceRow, cut
from gangline.runs.job import SourceJob
from gangline.worker.data.model_folder import HuggingFace
from gangline.worker.data.rows import read_files


def all_ids(tokens):
    return [int(token) for index in range(len(tokens)) for token in tokens.sample(index).input_ids]


def read(path, *, passages=False):
    return list(read_files((str(path),), columns=frozenset({"text"}), passages=passages, position=ReadPosition()))


class TestText:
    def test_a_file_is_one_document_however_it_is_read(self, tokens_of, tmp_path, model, as_filed):
        numbers = random.Random(0)
        words = ["dogs", "pull.", "\n", "\n\n", "sled", "  ", "ünïcode", "7", "(six)", "\t"]
        text = " ".join(numbers.choices(words, k=200_000))
        assert len(text) > 2 * PIECE_CHARS, "the text must be read in several pieces"
        (tmp_path / "book.txt").write_text(text)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens = tokens_of(tmp_path / "book.txt", packing=False, sequence_length=128)
        assert [int(token) for sample in as_filed(tokens) for token in sample.input_ids] == [
            *tokenizer.encode(text),
            tokenizer.eos_token_id,
        ]
        assert tokens.num_label_tokens == tokens.num_tokens - 1
        assert tokens.manifest["counts"]["source_rows"] == 1

    def test_two_files_are_two_documents(self, tokens_of, tmp_path, model, as_filed):
        (tmp_path / "a.txt").write_text("two dogs")
        (tmp_path / "b.md").write_text("six dogs\r\n")
        tokens = tokens_of(tmp_path / "a.txt", tmp_path / "b.md", packing=False)
        decode = AutoTokenizer.from_pretrained(model).decode
        assert [decode(sample.input_ids) for sample in as_filed(tokens)] == ["two dogs</s>", "six dogs\n</s>"]

    @pytest.mark.parametrize("size", range(1, 40))
    def test_cutting_loses_nothing(self, size):
        text = "The rope joins every dog\nof a sled team. " * 3
        pieces, rest = [], text
        while rest:
            at = cut(rest, size)
            pieces.append(rest[:at])
            rest = rest[at:]
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= size for piece in pieces)

    def test_a_piece_ends_where_a_word_ends_never_between_spaces(self):
        assert cut("two dogs    pull", 14) == len("two dogs")
        assert cut("two dogs    pull", 10) == len("two dogs")

    def test_a_line_that_is_not_utf_8_is_named(self, tokens_of, tmp_path):
        (tmp_path / "old.txt").write_bytes(b"two dogs\nna\xefve dogs\nsix dogs\n")
        with pytest.raises(DataError, match=r"old\.txt:2: not UTF-8 text"):
            tokens_of(tmp_path / "old.txt")

    def test_a_line_that_is_not_utf_8_can_be_left_out(self, tokens_of, tmp_path, model):
        (tmp_path / "old.txt").write_bytes(b"two dogs\nna\xefve dogs\nsix dogs\n")
        tokens = tokens_of(tmp_path / "old.txt", skip_bad_rows=True)
        assert AutoTokenizer.from_pretrained(model).decode(all_ids(tokens)) == "two dogs\nsix dogs\n</s>"
        assert tokens.manifest["counts"]["skipped_rows"] == 1

    def test_a_byte_order_mark_is_no_text(self, tmp_path):
        (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfdogs")
        assert [row.values for row in read(tmp_path / "bom.txt")] == [{"text": "dogs"}]


class TestJsonLines:
    def test_gz_and_plain_give_the_same(self, tokens_of, write_rows, tmp_path):
        plain = write_rows([{"text": f"{index} dogs"} for index in range(50)])
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        assert all_ids(tokens_of(plain)) == all_ids(tokens_of(tmp_path / "rows.jsonl.gz"))

    def test_empty_lines_are_no_rows_and_empty_texts_no_documents(self, tokens_of, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"text": "two dogs"}\n\n{"text": ""}\n{"text": "six dogs"}\n')
        tokens = tokens_of(tmp_path / "rows.jsonl", packing=False)
        assert len(tokens) == 2
        assert tokens.manifest["counts"]["skipped_rows"] == 0

    def test_a_long_row_is_the_same_as_a_long_file(self, tokens_of, write_rows, tmp_path):
        text = "The rope joins every dog. " * 30_000
        (tmp_path / "book.txt").write_text(text)
        row = write_rows([{"text": text}])
        assert all_ids(tokens_of(row, packing=False)) == all_ids(tokens_of(tmp_path / "book.txt", packing=False))

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"text": "two', "not JSON: Unterminated string"),
            (b'["two"]', "a JSON list, not an object"),
            (b'"two"', "a JSON str, not an object"),
            (b'{"text": "\xff"}', "not UTF-8"),
            (b'{"text": null}', "'text' is null"),
            (b'{"text": 7}', "'text' is a int, not a text"),
            (b'{"text": "\\ud800"}', "'text' has half a surrogate pair"),
            (b"[" * 100_000, "not JSON"),
            (b'{"body": "two"}', r"no field 'text'; there are 'body'; did you mean data.fields: \{text: body\}\?"),
            (b'{"txt": "two"}', r"no field 'text'; there are 'txt'; did you mean data.fields: \{text: txt\}\?"),
            (b"{}", "no field 'text'; there are none"),
        ],
    )
    def test_a_malformed_row_is_named_with_its_line_and_reason(self, tokens_of, tmp_path, line, reason):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'{"text": "two dogs"}\n' + line + b'\n{"text": "six dogs"}\n')
        with pytest.raises(DataError, match=f"1 row cannot be used.*\n  .*rows.jsonl:2: {reason}") as caught:
            tokens_of(path)
        assert caught.value.exit_code == 2
        assert caught.value.seen
        assert "skip_bad_rows" in caught.value.fix
        tokens = tokens_of(path, skip_bad_rows=True, packing=False)
        assert len(tokens) == 2
        assert tokens.manifest["counts"]["skipped_rows"] == 1
        assert "rows.jsonl:2: " in tokens.manifest["bad_rows"][0]

    def test_many_bad_rows_are_counted_and_a_reason_is_told_once(self, tokens_of, write_rows):
        rows = [{"text": "two dogs"}, *({"text": index} for index in range(37))]
        with pytest.raises(DataError, match="37 rows cannot be used:") as caught:
            tokens_of(write_rows(rows))
        told = "rows.jsonl:2: 'text' is a int, not a text; also in lines 3, 4, 5, 6 and 32 more"
        assert caught.value.what.splitlines()[1].endswith(told)
        assert len(caught.value.what.splitlines()) == 2

    def test_a_json_object_over_many_lines_is_not_json_lines(self, tokens_of, tmp_path):
        (tmp_path / "rows.json").write_text('{\n"data": []}\n')
        with pytest.raises(DataError, match="one JSON object, neither JSON lines nor an array") as caught:
            tokens_of(tmp_path / "rows.json")
        assert "jq -c" in caught.value.fix

    def test_a_compressed_file_that_ends_early(self, tokens_of, write_rows, tmp_path):
        whole = gzip.compress(write_rows([{"text": f"{index} dogs"} for index in range(5000)]).read_bytes())
        (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=r"cut\.jsonl\.gz: cannot be read") as caught:
            tokens_of(tmp_path / "cut.jsonl.gz")
        assert "EOFError" in caught.value.seen


class TestParquet:
    def test_the_same_rows_as_json_lines(self, tokens_of, write_rows, tmp_path):
        rows = [{"text": f"{index} dogs", "other": index} for index in range(2500)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
        assert all_ids(tokens_of(tmp_path / "rows.parquet")) == all_ids(tokens_of(write_rows(rows)))

    def test_conversations_in_nested_columns(self, tmp_path, tokens_of, make_model):
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "six dogs"}]
        parquet.write_table(pa.Table.from_pylist([{"messages": talk}]), tmp_path / "rows.parquet")
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        tokens = tokens_of(tmp_path / "rows.parquet", folder=make_model(template=template), format="chat")
        assert len(tokens) == 1

    def test_a_missing_column_is_named_with_those_that_are_there(self, tokens_of, tmp_path):
        parquet.write_table(pa.table({"question": ["a"], "answer": ["b"]}), tmp_path / "rows.parquet")
        with pytest.raises(DataError, match="no field 'prompt'; there are 'question', 'answer'; did you mean"):
            tokens_of(tmp_path / "rows.parquet", format="completion")

    def test_a_file_that_is_no_parquet(self, tokens_of, tmp_path):
        (tmp_path / "rows.parquet").write_text("nothing of the kind")
        with pytest.raises(DataError, match="not a readable parquet file"):
            tokens_of(tmp_path / "rows.parquet")


def test_every_kind_of_file_gives_the_same_token_set(tokens_of, make_model, tmp_path):
    call = {"name": "count", "arguments": {"of": "dogs"}}
    other = {"name": "look", "arguments": {"at": 'the "sky"'}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"how many, {number}?"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": call if number % 2 else other}]},
                {"role": "assistant", "content": f"ünïcode, {number}\n"},
            ],
            "id": number,
        }
        for number in range(150)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as stream:
        stream.write(lines)
    with (tmp_path / "e.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["id", "messages"], *([row["id"], json.dumps(row["messages"])] for row in rows)])
    parquet.write_table(table, tmp_path / "f.parquet", row_group_size=40)
    with pa.ipc.new_stream(str(tmp_path / "g.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=40)
    feather.write_feather(table, str(tmp_path / "h.feather"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    folder = make_model(template=template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    files = sorted(tmp_path.glob("?.*"))
    sets = [tokens_of(file, folder=folder, format="chat", sequence_length=512) for file in files]
    assert len(sets) == 8
    assert [each.manifest["files"] for each in sets] == [sets[0].manifest["files"]] * 8
    assert sets[0].manifest["counts"]["source_rows"] == 150


class FakeHub:
    def __init__(self, texts):
        self.texts = texts
        self.asked = []

    def revision(self, source):
        return "c0ffee"

    def rows(self, source, commit):
        self.asked.append((source.hub, source.split, commit))
        for number, text in enumerate(self.texts, start=1):
            yield SourceRow(file=f"{source.hub}/{source.split}", number=number, values={"text": text})


class TestHub:
    def test_rows_are_streamed_at_the_commit_that_was_hashed(self, tokens_of, write_rows):
        hub = FakeHub(["two dogs", "six dogs"])
        tokens = tokens_of(train=SourceJob(hub="kennel/dogs"), hub=hub)
        assert hub.asked == [("kennel/dogs", "train", "c0ffee")]
        assert all_ids(tokens) == all_ids(tokens_of(write_rows([{"text": text} for text in hub.texts])))
        tokens_of(train=SourceJob(hub="kennel/dogs"), hub=hub)
        assert len(hub.asked) == 1, "the set is found by its hash"

    def test_nested_values_are_those_of_the_data_set_not_of_its_table(self, monkeypatch):
        row = {"id": None, "messages": [{"role": "user", "content": "a", "name": None, "calls": [{"b": None, "c": 1}]}]}
        monkeypatch.setattr("datasets.load_dataset", lambda *_words, **_options: [row])
        (found,) = HuggingFace().rows(SourceJob(hub="kennel/dogs"), "c0ffee")
        assert found.values == {"id": None, "messages": [{"role": "user", "content": "a", "calls": [{"c": 1}]}]}
        assert found.place == "kennel/dogs/train row 1"

    @pytest.mark.parametrize("ask", [HuggingFace().revision, lambda source: list(HuggingFace().rows(source, "main"))])
    def test_without_a_network_the_error_says_what_to_do(self, ask):
        with pytest.raises(DataError, match=r"hub data set kennel/dogs.*cannot be read") as caught:
            ask(SourceJob(hub="kennel/dogs"))
        assert caught.value.seen
        assert "name its files in data.train" in caught.value.fix


def test_progress_reaches_the_size_of_the_files(write_rows, tmp_path):
    rows = [{"text": "dogs " * 20} for _ in range(3000)]
    plain = write_rows(rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), table)
    text = tmp_path / "rows.txt"
    text.write_text(json.dumps(rows))
    files = tuple(str(path) for path in (plain, packed, table, text))
    position = ReadPosition()
    rows_read = read_files(files, columns=frozenset({"text"}), passages=False, position=position)
    seen = [position.done_bytes for _ in rows_read]
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert position.done_bytes == sum(path.stat().st_size for path in (plain, packed, table, text))

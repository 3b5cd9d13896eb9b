"""Which rows of several sources a set has, and how often: the same ones on every host, and no other."""

import collections
import json

import pytest
from transformers import AutoTokenizer

from gangline import row_files
from gangline.errors import DataError
from gangline.row_check import Chosen
from gangline.row_files import BadRow, SourceRow
from gangline.runs.job import DataJob, SliceJob, SourceJob, row_edges
from gangline.worker.data import TokenSet
from gangline.worker.data.choose import Part, chosen_rows
from gangline.worker.data.prepare import prepare_inputs
from gangline.worker.data.row_formats import Format
from tests.train.data.test_inputs import texts_of


class Rows:
    """Rows `a0`, `a1` ... of a source, and how many of them were read."""

    def __init__(self, name="a", num_rows=10, texts=None):
        self.texts = texts or [f"{name}{number}" for number in range(num_rows)]
        self.num_read = 0

    def __call__(self):
        for number, text in enumerate(self.texts, start=1):
            self.num_read += 1
            if text is None:
                yield BadRow(file="rows", number=number, reason="bad")
            else:
                yield SourceRow("rows", number, {"text": text})


def chosen(*sources, seed=0, max_samples=None, **data):
    """Texts of the rows that are chosen. sources: (rows, words of SourceJob)."""
    job = DataJob(train=SourceJob(), **data)
    parts = [Part(source=SourceJob(**words), format=Format.of(job), read=rows) for rows, words in sources]
    rows = [each.row for each in chosen_rows(parts, job, seed=seed, max_samples=max_samples)]
    return [row.values["text"] if isinstance(row, SourceRow) else None for row in rows]


def of(start=None, stop=None, percent=False):
    return {"rows": SliceJob(start=start, stop=stop, percent=percent)}


class TestSlices:
    @pytest.mark.parametrize(
        ("words", "python"),
        [
            (of(2, 5), slice(2, 5)),
            (of(None, 3), slice(None, 3)),
            (of(7), slice(7, None)),
            (of(7, 99), slice(7, 99)),
            (of(-3), slice(-3, None)),
            (of(2, -2), slice(2, -2)),
            (of(None, 30, percent=True), slice(0, 3)),
            (of(30, 70, percent=True), slice(3, 7)),
            (of(-20, None, percent=True), slice(8, 10)),
            (of(None, 26, percent=True), slice(0, 3)),
        ],
    )
    @pytest.mark.parametrize("others", [{}, {"deduplicate": True}])
    def test_rows_are_those_of_a_python_slice_or_of_hundredths(self, words, python, others):
        rows = Rows()
        assert chosen((rows, words), **others) == rows.texts[python]
        for limit in (None, 2):
            looked_at = Chosen(*row_edges(words["rows"], limit, lambda: 10)).take(rows())
            assert [row.values["text"] for row in looked_at] == rows.texts[python][:limit]

    def test_nothing_is_read_beyond_the_last_row(self):
        rows = Rows(num_rows=1000)
        assert chosen((rows, of(3, 5))) == ["a3", "a4"]
        assert chosen((rows, {"max_samples": 4})) == ["a0", "a1", "a2", "a3"]
        assert rows.num_read < 15

    def test_hundredths_that_meet_lose_no_row_and_double_none(self):
        rows = Rows(num_rows=997)
        parts = [(rows, of(edge, edge + 10, percent=True)) for edge in range(0, 100, 10)]
        assert chosen(*parts) == rows.texts


class TestMaxSamples:
    def test_the_first_rows_or_random_ones(self):
        rows = Rows(num_rows=100)
        assert chosen((rows, {"max_samples": 5})) == rows.texts[:5]
        shuffled = chosen((rows, {"max_samples": 5}), shuffle=True)
        assert len(set(shuffled)) == 5
        assert shuffled != rows.texts[:5]
        assert shuffled == sorted(shuffled, key=rows.texts.index), "their order is that of the source"

    def test_random_rows_follow_from_the_seed_alone(self):
        def draw(seed):
            return chosen((Rows(num_rows=100), {"max_samples": 5}), (Rows("b", 50), {}), seed=seed, shuffle=True)

        assert draw(3) == draw(3)
        assert draw(3) != draw(4)

    def test_the_choice_of_a_seed_never_changes(self):
        # other rows here are another version of the set: raise CHOICE_VERSION
        assert chosen((Rows(num_rows=1000), {"max_samples": 4}), shuffle=True) == ["a11", "a269", "a855", "a921"]

    def test_of_all_sources_together(self):
        parts = (Rows("a", 5), {}), (Rows("b", 5), {"max_samples": 3})
        assert chosen(*parts, max_samples=7) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]
        assert len(chosen(*parts, max_samples=99)) == 8
        mixed = chosen(*parts, max_samples=4, shuffle=True, seed=1)
        assert len(mixed) == 4
        assert {text[0] for text in mixed} == {"a", "b"}

    def test_bad_rows_count_for_they_may_be_mended(self):
        assert chosen((Rows(texts=["a", None, "b"]), {"max_samples": 2})) == ["a", None]


class TestWeights:
    @pytest.mark.parametrize(("weight", "num_rows"), [(1, 40), (2, 80), (0.5, 20), (2.5, 100), (0.33, 13), (0.01, 0)])
    def test_a_source_has_exactly_as_many_rows_as_its_weight_says(self, weight, num_rows):
        found = collections.Counter(chosen((Rows(num_rows=40), {"weight": float(weight)})))
        assert found.total() == num_rows
        if num_rows >= 40:
            assert set(found.values()) <= {int(weight), int(weight) + 1}

    def test_weights_count_what_is_left_after_the_cut(self):
        found = chosen((Rows("a"), {"max_samples": 2, "weight": 2.0}), (Rows("b", 2), {}))
        assert found == ["a0", "a1", "a0", "a1", "b0", "b1"]
        assert chosen((Rows("a"), {"weight": 2.0}), max_samples=11)[-1] == "a0"

    def test_the_part_of_a_weight_is_not_every_second_row(self):
        found = chosen((Rows(num_rows=1000), {"weight": 0.5}))
        even = sum(int(text[1:]) % 2 == 0 for text in found)
        assert 200 < even < 300


class TestDuplicates:
    def test_the_first_of_equal_rows_stays_whatever_source_it_is_in(self):
        first, second = Rows(texts=["x", "y", "x"]), Rows(texts=["y", "z"])
        assert chosen((first, {}), (second, {})) == ["x", "y", "x", "y", "z"]
        assert chosen((first, {}), (second, {}), deduplicate=True) == ["x", "y", "z"]

    def test_the_cut_counts_distinct_rows(self):
        assert chosen((Rows(texts=["x", "x", "x", "y", "z"]), {"max_samples": 2}), deduplicate=True) == ["x", "y"]

    def test_a_weight_repeats_what_is_left(self):
        assert chosen((Rows(texts=["x", "x", "y"]), {"weight": 2.0}), deduplicate=True) == ["x", "y", "x", "y"]

    def test_bad_rows_are_no_duplicates(self):
        assert chosen((Rows(texts=[None, "x", None]), {}), deduplicate=True) == [None, "x", None]


class TestSets:
    def test_files_of_several_kinds_and_formats_in_one_set(self, make_job, make_model, write_rows, tmp_path):
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
        template += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        folder = make_model(template=template)
        turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "six dogs"}]
        (tmp_path / "share.json").write_text(json.dumps([{"conversations": turns}]))
        (tmp_path / "rows.csv").write_text("question,answer\nhow many?, two dogs\n")
        (tmp_path / "book.txt").write_text("The rope joins every dog. " * 20)
        share = {"messages": "conversations", "role": "from", "content": "value"}
        speakers = {"human": "user", "gpt": "assistant"}
        mix = (
            SourceJob(files=(str(tmp_path / "share.json"),), format="chat", fields=share, roles=speakers, weight=2.0),
            SourceJob(files=(str(tmp_path / "rows.csv"),), fields={"prompt": "question", "completion": "answer"}),
            SourceJob(files=(str(tmp_path / "book.txt"),), format="text"),
        )
        job = make_job(folder=folder, train=SourceJob(mix=mix), format="completion", sequence_length=16)
        inputs = prepare_inputs(job, tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = collections.Counter(texts_of(tmp_path / "data" / inputs.train, tokenizer))
        assert texts.pop("<|user|>hello<|assistant|>six dogs</s>") == 2
        assert texts.pop("how many? two dogs</s>") == 1
        assert len(texts) > 5, "a text is split, also beside rows of other formats"
        counts = inputs.counts["train"]
        assert (counts["source_rows"], counts["truncated_rows"]) == (3, 0)
        book = len(tokenizer.encode("The rope joins every dog. " * 20))
        chat = 2 * len(tokenizer.encode("six dogs</s>"))
        assert counts["label_tokens"] == book + chat + len(tokenizer.encode(" two dogs</s>"))

    def test_a_text_in_pieces_is_the_same_in_a_set_with_masks(self, tokens_of, write_rows, tmp_path):
        (tmp_path / "book.txt").write_text("The rope joins every dog. " * 12_000)
        row = write_rows([{"prompt": "a", "completion": "b"}])
        book = SourceJob(files=(str(tmp_path / "book.txt"),), format="text")
        mix = SourceJob(mix=(book, SourceJob(files=(str(row),), format="completion")))
        alone, mixed = tokens_of(tmp_path / "book.txt", packing=False), tokens_of(train=mix, packing=False)

        def ids(tokens):
            return sorted(tuple(zip(each.input_ids, each.targets, strict=True)) for each in samples(tokens))

        one = set(ids(mixed)) - set(ids(alone))
        assert set(ids(alone)) < set(ids(mixed))
        assert len(one) == 1
        assert mixed.num_label_tokens == alone.num_label_tokens + 2

    def test_a_text_in_pieces_counts_as_one_row(self, tokens_of, tmp_path, monkeypatch):
        monkeypatch.setattr(row_files, "PIECE_CHARS", 1 << 12)
        for name in ("a", "b", "c"):
            (tmp_path / f"{name}.txt").write_text(("The rope joins every dog. " * 500) + name.replace("c", "a"))
        files = tuple(str(tmp_path / f"{name}.txt") for name in ("a", "b", "c"))
        (one,) = {tokens_of(file, packing=False).num_tokens for file in files}
        for words, num_books in (({"max_samples": 2}, 2), ({"weight": 2.0}, 6), (of(1), 2), (of(-1), 1)):
            tokens = tokens_of(train=SourceJob(files=files, **words), packing=False)
            assert tokens.num_tokens == num_books * one
            assert tokens.manifest["counts"]["source_rows"] == min(3, num_books)
        assert tokens_of(*files, packing=False, deduplicate=True).num_tokens == 2 * one

    @pytest.mark.parametrize(
        "words",
        [
            {"max_samples": 7},
            {"max_samples": 7, "shuffle": True},
            {"max_samples": 7, "shuffle": True, "seed": 1},
            {"deduplicate": True},
            {"source": {"max_samples": 7}},
            {"source": {"weight": 2.0}},
            {"source": {"weight": 1.5}},
            {"source": of(None, 7)},
            {"source": {"format": "completion", "fields": {"prompt": "text", "completion": "text"}}},
        ],
    )
    def test_whatever_is_chosen_otherwise_has_another_hash(self, make_job, write_rows, tmp_path, words):
        rows = write_rows([{"text": f"{number} dogs"} for number in range(20)])
        words = dict(words)
        source = SourceJob(files=(str(rows),), **words.pop("source", {}))
        plain = prepare_inputs(make_job(rows), tmp_path).train
        found = prepare_inputs(make_job(train=source, **words), tmp_path)
        assert found.train != plain
        again = prepare_inputs(make_job(train=source, **words), tmp_path)
        assert (again.train, again.counts["train"]["reused"]) == (found.train, True)
        if "seed" in words:
            other = prepare_inputs(make_job(train=source, **{**words, "seed": 0}), tmp_path)
            assert other.train != found.train

    def test_what_is_set_apart_is_chosen_too_and_evaluated_once(self, make_job, write_rows, tmp_path, model):
        rows = write_rows([{"text": f"{number} dogs"} for number in range(200)])
        source = SourceJob(files=(str(rows),), weight=3.0)
        job = make_job(train=source, evaluation_fraction=0.25, deduplicate=True)
        inputs = prepare_inputs(job, tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(model)
        train = collections.Counter(texts_of(tmp_path / "data" / inputs.train, tokenizer))
        evaluation = collections.Counter(texts_of(tmp_path / "data" / inputs.evaluation, tokenizer))
        assert set(train.values()) == {3}
        assert set(evaluation.values()) == {1}
        assert len(train) + len(evaluation) == 200
        assert not set(train) & set(evaluation)

    def test_rows_for_evaluation_have_their_own_cut(self, make_job, write_rows, tmp_path):
        rows = write_rows([{"text": f"{number} dogs"} for number in range(50)])
        source = SourceJob(files=(str(rows),))
        job = make_job(rows, evaluation=source, max_samples=5, packing=False)
        inputs = prepare_inputs(job, tmp_path)
        assert len(TokenSet.open(tmp_path / "data" / inputs.train)) == 5
        assert len(TokenSet.open(tmp_path / "data" / inputs.evaluation)) == 50

    def test_a_bad_row_is_told_once_however_often_it_occurs(self, make_job, write_rows, tmp_path):
        rows = write_rows([{"text": "two dogs"}, {"text": 7}])
        job = make_job(train=SourceJob(files=(str(rows),), weight=3.0))
        with pytest.raises(DataError, match="1 row cannot be used"):
            prepare_inputs(job, tmp_path)


def samples(tokens):
    return [tokens.sample(index) for index in range(len(tokens))]

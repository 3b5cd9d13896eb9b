"""Made once, whole or absent; the same words on the same side; every wrong input named."""

import itertools
import json
import os
import re
import signal
import sys

import fsspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from gangline.errors import DataError, ModelError, UsageError
from gangline.formats import Segment
from gangline.row_files import SourceRow
from gangline.runs.job import SourceJob
from gangline.worker.data import NO_TARGET, TokenSet, verify
from gangline.worker.data.build import Tooling, _batches, ensure_set, plan_sets
from gangline.worker.data.model_folder import DigestCache, HuggingFace
from gangline.worker.data.prepare import inputs_main, prepare_inputs
from gangline.worker.data.row_formats import Format, TokenSpan
from gangline.worker.data.tokenise import Encoder
from tests.train.data import cases_inputs


def rows_of(num_rows, seed=0):
    numbers = np.random.default_rng(seed)
    return [{"text": f"{index} " + "dogs pull " * int(numbers.integers(1, 6))} for index in range(num_rows)]


def texts_of(folder, tokenizer):
    tokens = TokenSet.open(folder)
    texts = []
    for index in range(len(tokens)):
        sample = tokens.sample(index)
        starts = [*np.flatnonzero(sample.position_ids == 0), len(sample.input_ids)]
        texts += [tokenizer.decode(sample.input_ids[a:b]) for a, b in itertools.pairwise(starts)]
    return texts


class TestOneHash:
    def test_the_same_content_is_found_again_wherever_it_lies(self, make_job, write_rows, tmp_path):
        first = prepare_inputs(make_job(write_rows(rows_of(20), "a.jsonl")), tmp_path)
        again = prepare_inputs(make_job(write_rows(rows_of(20), "b.jsonl")), tmp_path)
        assert first.train == again.train
        assert (first.counts["train"]["reused"], again.counts["train"]["reused"]) == (False, True)
        assert first.model == again.model

    @pytest.mark.parametrize(
        "change",
        [
            {"sequence_length": 65},
            {"packing": False},
            {"overlong": "truncate"},
            {"skip_bad_rows": True},
            {"fields": {"text": "other"}},
            {"evaluation_fraction": 0.3},
            {"evaluation_fraction": 0.3, "seed": 1},
        ],
    )
    def test_whatever_changes_the_samples_changes_the_hash(self, make_job, write_rows, tmp_path, change):
        rows = write_rows([{**row, "other": row["text"]} for row in rows_of(50)])
        known = {prepare_inputs(make_job(rows), tmp_path).train}
        if "seed" in change:
            known.add(prepare_inputs(make_job(rows, **{**change, "seed": 0}), tmp_path).train)
        assert prepare_inputs(make_job(rows, **change), tmp_path).train not in known

    def test_another_row_or_another_tokenizer_changes_the_hash(self, make_job, make_model, write_rows, tmp_path):
        rows = write_rows(rows_of(20))
        before = prepare_inputs(make_job(rows), tmp_path).train
        assert prepare_inputs(make_job(rows, folder=make_model(bos=True)), tmp_path).train != before
        write_rows(rows_of(21))
        assert prepare_inputs(make_job(rows), tmp_path).train != before

    def test_what_does_not_touch_the_tokens_keeps_the_hash(self, make_job, write_rows, tmp_path):
        rows = write_rows(rows_of(20))
        assert prepare_inputs(make_job(rows), tmp_path).train == prepare_inputs(make_job(rows, seed=9), tmp_path).train

    def test_a_damaged_set_is_made_again(self, make_job, write_rows, tmp_path):
        job = make_job(write_rows(rows_of(20)))
        folder = tmp_path / "data" / prepare_inputs(job, tmp_path).train
        with (folder / "tokens.bin").open("ab") as stream:
            stream.truncate(4)
        with pytest.raises(DataError, match=r"tokens\.bin has 4 bytes"):
            TokenSet.open(folder)
        assert not prepare_inputs(job, tmp_path).counts["train"]["reused"]
        verify(folder)

    @pytest.mark.parametrize("name", ["tokens.bin", "sample_rows.bin", "lengths.bin"])
    def test_a_set_with_a_flipped_byte_is_made_again(self, make_job, write_rows, tmp_path, name):
        job = make_job(write_rows(rows_of(20)))
        path = tmp_path / "data" / prepare_inputs(job, tmp_path).train / name
        before = path.read_bytes()
        path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        assert not prepare_inputs(job, tmp_path).counts["train"]["reused"]
        assert path.read_bytes() == before
        assert prepare_inputs(job, tmp_path).counts["train"]["reused"]

    def test_a_flipped_byte_is_found_by_verify(self, make_job, write_rows, tmp_path):
        folder = tmp_path / "data" / prepare_inputs(make_job(write_rows(rows_of(20))), tmp_path).train
        data = bytearray((folder / "tokens.bin").read_bytes())
        data[7] ^= 1
        (folder / "tokens.bin").write_bytes(data)
        TokenSet.open(folder)
        with pytest.raises(DataError, match="not a whole token set") as caught:
            verify(folder)
        assert "tokens.bin has the hash" in caught.value.seen

    @pytest.mark.parametrize("text", [None, "{", "[]", '{"format_version": 99, "files": {}}'])
    def test_a_folder_that_is_no_token_set(self, tmp_path, text):
        if text is not None:
            (tmp_path / "set.json").write_text(text)
        with pytest.raises(DataError, match="not a whole token set"):
            TokenSet.open(tmp_path)

    def test_a_second_start_reads_no_file_again(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("one")
        os.utime(path, (1, 1))
        cache = DigestCache(tmp_path / "digests.json")
        before = cache.digest(path)
        cache.save()
        beats = []
        again = DigestCache(tmp_path / "digests.json", beat=lambda: beats.append(1))
        assert again.digest(path) == before
        assert not beats
        path.write_text("two")
        second = again.digest(path)
        assert second != before, "a change of content within the same size is noticed by its time"
        status = path.stat()
        path.write_text("six")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert again.digest(path) != second, "a file changed a moment ago is not remembered"


class TestSplit:
    def test_a_fraction_is_cut_off_and_no_row_is_lost_or_doubled(self, make_job, write_rows, tmp_path, model):
        rows = rows_of(400)
        inputs = prepare_inputs(make_job(write_rows(rows), evaluation_fraction=0.25), tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(model)
        train = texts_of(tmp_path / "data" / inputs.train, tokenizer)
        evaluation = texts_of(tmp_path / "data" / inputs.evaluation, tokenizer)
        assert sorted(train + evaluation) == sorted(row["text"] + "</s>" for row in rows)
        assert 0.15 < len(evaluation) / 400 < 0.35
        assert inputs.counts["evaluation"]["source_rows"] == len(evaluation)

    def test_a_row_stays_on_its_side_whatever_is_around_it(self, make_job, write_rows, tmp_path, model):
        tokenizer = AutoTokenizer.from_pretrained(model)

        def evaluation_texts(rows, name):
            inputs = prepare_inputs(make_job(write_rows(rows, name), evaluation_fraction=0.25), tmp_path)
            return set(texts_of(tmp_path / "data" / inputs.evaluation, tokenizer))

        rows, others = rows_of(200), [{"text": f"other {index}"} for index in range(100)]
        before = evaluation_texts(rows, "a.jsonl")
        after = evaluation_texts([*others, *reversed(rows)], "b.jsonl")
        assert before <= after
        assert all(text.startswith("other") for text in after - before)

    def test_another_seed_cuts_elsewhere(self, make_job, write_rows, tmp_path, model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = write_rows(rows_of(200))
        sides = []
        for seed in (0, 1):
            inputs = prepare_inputs(make_job(rows, evaluation_fraction=0.5, seed=seed), tmp_path)
            sides.append(set(texts_of(tmp_path / "data" / inputs.evaluation, tokenizer)))
        assert sides[0] != sides[1]

    def test_one_text_file_is_cut_into_passages(self, make_job, tmp_path):
        (tmp_path / "book.txt").write_text("".join(f"{index} dogs pull the sled\n" for index in range(20_000)))
        inputs = prepare_inputs(make_job(tmp_path / "book.txt", evaluation_fraction=0.2), tmp_path)
        total = inputs.counts["train"]["source_rows"] + inputs.counts["evaluation"]["source_rows"]
        assert total > 40
        assert 0 < inputs.counts["evaluation"]["source_rows"] < total / 2

    def test_a_file_of_its_own(self, make_job, write_rows, tmp_path):
        evaluation = SourceJob(files=(str(write_rows(rows_of(7, seed=5), "e.jsonl")),))
        inputs = prepare_inputs(make_job(write_rows(rows_of(20)), evaluation=evaluation), tmp_path)
        assert inputs.counts["train"]["source_rows"] == 20
        assert inputs.counts["evaluation"]["source_rows"] == 7

    def test_bad_rows_are_counted_once(self, make_job, write_rows, tmp_path):
        rows = write_rows([*rows_of(100), {"nothing": 1}, {"text": 3}])
        inputs = prepare_inputs(make_job(rows, evaluation_fraction=0.5, skip_bad_rows=True), tmp_path)
        assert inputs.counts["train"]["skipped_rows"] == 2
        assert inputs.counts["evaluation"]["skipped_rows"] == 0


class TestWrongInput:
    def check(self, job, root, *, error=DataError, match):
        with pytest.raises(error, match=match) as caught:
            prepare_inputs(job, root)
        assert caught.value.exit_code == 2
        assert caught.value.seen
        assert caught.value.fix
        left = [path.name for path in root.glob("data/*") if path.suffix != ".lock" and path.name != "digests.json"]
        assert not left, "nothing half-written stays"

    def test_missing_files_are_all_named(self, make_job, tmp_path):
        job = make_job(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        self.check(job, tmp_path, match=r"data.train: .*a.jsonl\ndata.train: .*b.jsonl")

    def test_an_empty_data_set(self, make_job, write_rows, tmp_path):
        self.check(make_job(write_rows([])), tmp_path, match="no token to learn in .*rows.jsonl")
        (tmp_path / "empty.txt").write_text("")
        self.check(make_job(tmp_path / "empty.txt"), tmp_path, match="no token to learn in .*empty.txt")

    def test_no_token_to_learn(self, make_job, write_rows, tmp_path):
        rows = write_rows([{"prompt": "how many?", "completion": ""}])
        job = make_job(rows, format="completion", skip_bad_rows=True)
        self.check(job, tmp_path, match="no token to learn")

    def test_a_fraction_that_leaves_nothing(self, make_job, write_rows, tmp_path):
        job = make_job(write_rows([{"text": "two dogs"}]), evaluation_fraction=1e-9)
        with pytest.raises(DataError, match=r"data\.eval: no token to learn .* after data\.eval: 1e-09"):
            prepare_inputs(job, tmp_path)

    def test_a_fraction_and_a_file(self, make_job, write_rows, tmp_path):
        rows = write_rows(rows_of(5))
        job = make_job(rows, evaluation=SourceJob(files=(str(rows),)), evaluation_fraction=0.1)
        self.check(job, tmp_path, match="both files and a fraction")

    def test_a_file_that_is_written_to_meanwhile(self, make_job, write_rows, tmp_path, model):
        job = make_job(write_rows(rows_of(50)))
        cache = DigestCache(tmp_path / "digests.json")
        (request,) = plan_sets(job, tokenizer_digest="t", vocab_size=400, cache=cache, hub=HuggingFace())
        tooling = Tooling(
            encoder=Encoder(AutoTokenizer.from_pretrained(model)), format=Format.of(job.data), vocab_size=400
        )

        def write_more(done_bytes, num_rows):
            write_rows(rows_of(60))

        with pytest.raises(DataError, match=r"rows\.jsonl: changed while it was read"):
            ensure_set(request, tmp_path, tooling=lambda: tooling, hub=HuggingFace(), tick=write_more)
        assert not list((tmp_path / "data").glob("*/set.json"))

    def test_plain_text_for_a_format_with_fields(self, make_job, tmp_path):
        (tmp_path / "rows.txt").write_text("two dogs")
        job = make_job(tmp_path / "rows.txt", format="completion")
        self.check(job, tmp_path, match="is plain text, data.format is completion")

    @pytest.mark.parametrize(
        "config",
        [
            {"vocab_size": 400, "max_position_embeddings": 32},
            {"vocab_size": 400, "n_positions": 32},
            {"text_config": {"vocab_size": 400, "max_position_embeddings": 32}},
        ],
    )
    def test_samples_longer_than_the_model_reads(self, make_job, make_model, write_rows, tmp_path, config):
        job = make_job(write_rows(rows_of(5)), folder=make_model(config=config))
        self.check(job, tmp_path, match="data.sequence_length: 64 is more than the model reads")

    @pytest.mark.parametrize("config", [{"vocab_size": 50}, {"text_config": {"vocab_size": 50}}])
    def test_tokens_that_the_model_does_not_know(self, make_job, make_model, write_rows, tmp_path, config):
        job = make_job(write_rows(rows_of(5)), folder=make_model(config=config))
        self.check(job, tmp_path, match="rows.jsonl:1: the tokenizer gives token .* which the model does not know")

    def test_a_set_made_for_a_larger_vocabulary_is_not_taken(self, make_job, make_model, write_rows, tmp_path):
        folder = make_model()
        job = make_job(write_rows(rows_of(5)), folder=folder)
        prepare_inputs(job, tmp_path)
        (folder / "config.json").write_text('{"vocab_size": 50}')
        with pytest.raises(DataError, match="which the model does not know"):
            prepare_inputs(job, tmp_path)

    def test_a_model_that_wants_its_own_code(self, make_job, make_model, write_rows, tmp_path):
        config = {"vocab_size": 400, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
        job = make_job(write_rows(rows_of(5)), folder=make_model(config=config))
        self.check(job, tmp_path, error=ModelError, match="wants to run its own code")

    def test_a_model_folder_without_weights(self, make_job, write_rows, tmp_path):
        job = make_job(write_rows(rows_of(5)), start="pretrained")
        self.check(job, tmp_path, error=ModelError, match="has no weights")

    def test_no_model_folder(self, make_job, write_rows, tmp_path):
        job = make_job(write_rows(rows_of(5)), folder=tmp_path / "nothing")
        self.check(job, tmp_path, error=ModelError, match="no such folder")

    @pytest.mark.parametrize("text", [None, "{", "[]"])
    def test_no_config(self, make_job, write_rows, tmp_path, text):
        (tmp_path / "model").mkdir()
        if text is not None:
            (tmp_path / "model" / "config.json").write_text(text)
        job = make_job(write_rows(rows_of(5)), folder=tmp_path / "model")
        self.check(job, tmp_path, error=ModelError, match=r"config.json")


class TestAddresses:
    @pytest.fixture
    def store(self):
        store = fsspec.filesystem("memory")
        store.pipe({f"/kennel/{name}.jsonl": lines(name).encode() for name in ("a", "b")})
        yield store
        store.rm("/kennel", recursive=True)

    def test_files_of_a_store_are_read_as_if_they_lay_here(self, store, make_job, tmp_path, model):
        inputs = prepare_inputs(make_job("memory://kennel/*.jsonl"), tmp_path)
        texts = texts_of(tmp_path / "data" / inputs.train, AutoTokenizer.from_pretrained(model))
        assert sorted(texts) == ["a0</s>", "a1</s>", "b0</s>", "b1</s>"]
        (tmp_path / "a.jsonl").write_text(lines("a"))
        (tmp_path / "b.jsonl").write_text(lines("b"))
        assert prepare_inputs(make_job(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), tmp_path).train == inputs.train

    def test_a_version_is_brought_once_and_another_one_is_another_set(self, store, make_job, tmp_path):
        job = make_job("memory://kennel/a.jsonl")
        first = prepare_inputs(job, tmp_path)
        (copy,) = (tmp_path / "data" / "remote").glob("*/a.jsonl")
        before = copy.stat().st_mtime_ns
        assert prepare_inputs(job, tmp_path).counts["train"]["reused"]
        assert copy.stat().st_mtime_ns == before
        store.pipe("/kennel/a.jsonl", lines("c").encode())
        assert prepare_inputs(job, tmp_path).train != first.train
        assert not list((tmp_path / "data" / "remote").glob("*/*.part"))

    @pytest.mark.parametrize(
        ("address", "reason"),
        [
            ("memory://kennel/none.jsonl", "cannot be read"),
            ("memory://kennel/*.csv", "no file"),
            ("nowhere://kennel/a.jsonl", "cannot be read"),
        ],
    )
    def test_what_is_not_there_is_named(self, store, make_job, tmp_path, address, reason):
        with pytest.raises(DataError, match=f"{re.escape(address)}: {reason}") as caught:
            prepare_inputs(make_job(address), tmp_path)
        assert caught.value.fix

    def test_a_store_without_its_package_is_refused_by_name(self, make_job, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(DataError, match=r"s3://kennel/a\.jsonl: this host has no package for s3://") as caught:
            prepare_inputs(make_job("s3://kennel/a.jsonl"), tmp_path)
        assert "pip install s3fs" in caught.value.fix


def lines(name):
    return "".join(json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(2))


class TestFingerprint:
    def test_it_follows_the_content_of_the_weights(self, make_job, make_model, write_rows, tmp_path):
        folder = make_model()
        weights = folder / "model.safetensors"
        weights.write_bytes(b"weights")
        job = make_job(write_rows(rows_of(5)), folder=folder, start="pretrained")
        before = prepare_inputs(job, tmp_path)
        weights.write_bytes(b"others!")
        after = prepare_inputs(job, tmp_path)
        assert before.model != after.model
        assert before.train == after.train


ONE_S = 60.0


class TestProcesses:
    def start(self, zygote, job, root, death="never"):
        job.save(root / "job.json")
        return zygote.fork(cases_inputs.prepare, job=str(root / "job.json"), root=str(root), death=death)

    def test_two_that_ask_at_once_tokenise_once(self, zygote, make_job, write_rows, tmp_path):
        job = make_job(write_rows(rows_of(3000)))
        both = [self.start(zygote, job, tmp_path) for _ in range(2)]
        assert sorted(process.result() for process in both) == ["made", "reused"]

    @pytest.mark.parametrize("death", ["tokenise", "index", "manifest"])
    def test_a_kill_in_the_middle_leaves_nothing_usable_and_the_next_succeeds(
        self, zygote, make_job, write_rows, tmp_path, death
    ):
        job = make_job(write_rows(rows_of(3000)))
        assert self.start(zygote, job, tmp_path, death).wait(timeout_s=ONE_S) == -signal.SIGKILL
        assert [path.suffix for path in (tmp_path / "data").iterdir() if path.is_dir()] == [".tmp"]
        inputs = prepare_inputs(job, tmp_path)
        assert not inputs.counts["train"]["reused"]
        assert len(verify(tmp_path / "data" / inputs.train)) > 0
        assert not list((tmp_path / "data").glob("*.tmp"))

    def test_what_a_killed_process_left_goes_with_the_next_start_of_any_job(
        self, zygote, make_job, write_rows, tmp_path
    ):
        self.start(zygote, make_job(write_rows(rows_of(3000))), tmp_path, "index").wait(timeout_s=ONE_S)
        assert list((tmp_path / "data").glob("*.tmp"))
        prepare_inputs(make_job(write_rows(rows_of(5), "other.jsonl")), tmp_path)
        assert not list((tmp_path / "data").glob("*.tmp"))

    def test_a_batch_is_bounded_in_characters_too(self):
        row = SourceRow(file="book.txt", number=1, values={})
        documents = (TokenSpan(row=row, segments=(Segment("x" * 100_000, learned=True),)) for _ in range(100))
        assert max(len(batch) for batch in _batches(documents)) * 100_000 < 2_000_000

    def test_memory_does_not_grow_with_the_rows(self, zygote, make_job, tmp_path):
        def growth(num_rows):
            path = tmp_path / f"{num_rows}.jsonl"
            with path.open("w") as stream:
                for index in range(num_rows):
                    stream.write(json.dumps({"text": f"{index} " + "dogs pull " * 200}) + "\n")
            make_job(path).save(tmp_path / "job.json")
            process = zygote.fork(cases_inputs.growth, job=str(tmp_path / "job.json"), root=str(tmp_path))
            return process.result(timeout_s=ONE_S), path.stat().st_size

        few_bytes, _ = growth(1000)
        many_bytes, file_bytes = growth(6000)
        assert many_bytes - few_bytes < file_bytes / 2, "the file must not be held in memory"


class TestCommand:
    def test_json_lines_with_progress_and_a_result(self, make_job, write_rows, tmp_path, capsys):
        rows = write_rows(rows_of(2500))
        make_job(rows, evaluation_fraction=0.1).save(tmp_path / "job.json")
        assert inputs_main([str(tmp_path / "job.json"), str(tmp_path)]) == 0
        *progress, result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["kind"] for line in progress} == {"progress"}
        assert {"done_bytes", "total_bytes", "rows"} <= set(progress[0])
        assert result["kind"] == "result"
        assert result["counts"]["train"]["source_rows"] + result["counts"]["evaluation"]["source_rows"] == 2500
        assert TokenSet.open(tmp_path / "data" / result["train"]).num_label_tokens > 0
        assert TokenSet.open(tmp_path / "data" / result["evaluation"]).num_label_tokens > 0
        assert result["model"]

    def test_wrong_words(self):
        with pytest.raises(UsageError):
            inputs_main(["one"])


class TestRealData:
    def test_gsm8k_learns_the_answers(self, make_job, make_model, tmp_path, real_data):
        folder = make_model()
        fields = {"prompt": "question", "completion": "answer"}
        job = make_job(
            real_data / "gsm8k" / "test.jsonl", folder=folder, format="completion", fields=fields, sequence_length=2048
        )
        inputs = prepare_inputs(job, tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = TokenSet.open(tmp_path / "data" / inputs.train)
        with (real_data / "gsm8k" / "test.jsonl").open(encoding="utf-8") as stream:
            answers = sorted(json.loads(line)["answer"] for line in stream)
        learned = []
        for index in range(len(tokens)):
            targets = tokens.sample(index).targets
            learned += tokenizer.decode(targets[targets != NO_TARGET]).split("</s>")[:-1]
        assert sorted(learned) == answers
        assert inputs.counts["train"]["truncated_rows"] == 0
        assert tokens.num_tokens / (len(tokens) * 2048) > 0.98

    def test_wikitext_is_a_stream_of_full_samples(self, make_job, tmp_path, real_data):
        inputs = prepare_inputs(make_job(real_data / "wikitext-2" / "valid.txt", sequence_length=512), tmp_path)
        tokens = TokenSet.open(tmp_path / "data" / inputs.train)
        assert (np.sort(tokens.lengths)[1:] == 512).all()
        assert tokens.num_label_tokens == tokens.num_tokens - 1

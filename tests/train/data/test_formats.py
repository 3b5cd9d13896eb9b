"""What the model sees and what it learns, position by position."""

import pytest
from transformers import AutoTokenizer

from gangline.errors import DataError
from gangline.formats import instruction_prompt
from gangline.worker.data import NO_TARGET


def learned(sample, tokenizer):
    return tokenizer.decode([token for token in sample.targets if token != NO_TARGET])


def seen(sample, tokenizer):
    return tokenizer.decode(sample.input_ids)


@pytest.fixture
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def test_text_learns_every_token_and_the_end_of_text(tokens_of, write_rows, tokenizer):
    tokens = tokens_of(write_rows([{"text": "The rope joins every dog."}]))
    sample = tokens.sample(0)
    ids = [*tokenizer.encode("The rope joins every dog."), tokenizer.eos_token_id]
    assert list(sample.input_ids) == ids
    assert list(sample.targets) == [*ids[1:], NO_TARGET]
    assert list(sample.position_ids) == list(range(len(ids)))
    assert list(tokens.label_counts) == [len(ids) - 1]
    assert list(tokens.lengths) == [len(ids)]


def test_completion_learns_the_completion_and_the_end_only(tokens_of, write_rows, tokenizer):
    rows = write_rows([{"question": "how many dogs?", "answer": " six dogs"}])
    fields = {"prompt": "question", "completion": "answer"}
    tokens = tokens_of(rows, format="completion", fields=fields)
    sample = tokens.sample(0)
    prompt, answer = tokenizer.encode("how many dogs?"), tokenizer.encode(" six dogs")
    assert list(sample.input_ids) == [*prompt, *answer, tokenizer.eos_token_id]
    hidden = [NO_TARGET] * (len(prompt) - 1)
    assert list(sample.targets) == [*hidden, *answer, tokenizer.eos_token_id, NO_TARGET]
    assert tokens.num_label_tokens == len(answer) + 1


def test_no_token_spans_the_end_of_the_prompt(tokens_of, write_rows, tokenizer):
    whole = tokenizer.encode("The dogs")
    prompt, answer = tokenizer.encode("The do"), tokenizer.encode("gs")
    assert whole != [*prompt, *answer], "these words must merge over the boundary, or the test shows nothing"
    sample = tokens_of(write_rows([{"prompt": "The do", "completion": "gs"}]), format="completion").sample(0)
    assert list(sample.input_ids) == [*prompt, *answer, tokenizer.eos_token_id]
    assert learned(sample, tokenizer) == "gs</s>"


def test_instruction_writes_its_headings_and_learns_the_output(tokens_of, write_rows, tokenizer, as_filed):
    rows = [
        {"instruction": "Count", "input": "dogs", "output": "six"},
        {"instruction": "Pull", "input": "", "output": "harder"},
        {"instruction": "Rest", "output": "now"},
    ]
    samples = as_filed(tokens_of(write_rows(rows), format="instruction", packing=False))
    assert [learned(sample, tokenizer) for sample in samples] == ["six</s>", "harder</s>", "now</s>"]
    assert seen(samples[0], tokenizer) == instruction_prompt("Count", "dogs") + "six</s>"
    assert seen(samples[2], tokenizer) == "### Instruction:\nRest\n\n### Response:\nnow</s>"


def test_alpaca_writes_the_words_of_stanford_and_learns_the_output(tokens_of, write_rows, tokenizer, as_filed):
    rows = [
        {"instruction": "Count", "input": "dogs", "output": "six"},
        {"instruction": "Rest", "output": "now"},
    ]
    samples = as_filed(tokens_of(write_rows(rows), format="alpaca", packing=False, sequence_length=512))
    assert [learned(sample, tokenizer) for sample in samples] == ["six</s>", "now</s>"]
    assert seen(samples[0], tokenizer) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nCount\n\n### Input:\ndogs\n\n### Response:\nsix</s>"
    )
    assert seen(samples[1], tokenizer) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nRest\n\n### Response:\nnow</s>"
    )


def test_a_tokenizer_that_puts_bos_first_keeps_doing_so_and_it_is_not_learned(make_model, tokens_of, write_rows):
    folder = make_model(bos=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokens_of(write_rows([{"text": "two dogs"}], "t.jsonl"), folder=folder).sample(0)
    assert seen(text, tokenizer) == "<s>two dogs</s>"
    row = write_rows([{"prompt": "two", "completion": " dogs"}], "c.jsonl")
    completion = tokens_of(row, folder=folder, format="completion").sample(0)
    assert seen(completion, tokenizer) == "<s>two dogs</s>"
    assert learned(completion, tokenizer) == " dogs</s>"


def test_a_bos_or_eos_that_the_text_has_already_is_not_doubled(make_model, tokens_of, write_rows):
    folder = make_model(bos=True)
    sample = tokens_of(write_rows([{"text": "<s>two dogs</s>"}]), folder=folder).sample(0)
    assert seen(sample, AutoTokenizer.from_pretrained(folder)) == "<s>two dogs</s>"


def test_a_tokenizer_without_eos_gets_none(make_model, tokens_of, write_rows):
    folder = make_model(eos=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sample = tokens_of(write_rows([{"text": "two dogs"}]), folder=folder).sample(0)
    assert seen(sample, tokenizer) == "two dogs"


def test_a_sentencepiece_tokenizer_puts_no_space_between_prompt_and_completion(make_model, tokens_of, write_rows):
    folder = make_model(spaces=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("dogs") * 2) == "dogs dogs"
    row = write_rows([{"prompt": "how many dogs?", "completion": "six dogs"}])
    sample = tokens_of(row, folder=folder, format="completion").sample(0)
    assert seen(sample, tokenizer) == "how many dogs?six dogs</s>"
    assert learned(sample, tokenizer) == "six dogs</s>"


def test_truncation_and_padding_saved_with_a_tokenizer_are_switched_off(make_model, tokens_of, write_rows):
    folder = make_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    sample = tokens_of(write_rows([{"text": "The rope joins every dog."}]), folder=folder).sample(0)
    assert seen(sample, AutoTokenizer.from_pretrained(folder)) == "The rope joins every dog.</s>"


class TestLongRows:
    LONG = "The rope joins every dog of a sled team. " * 40

    def test_a_long_text_goes_on_in_the_next_row_and_no_label_is_lost(self, tokens_of, write_rows, tokenizer, as_filed):
        tokens = tokens_of(write_rows([{"text": self.LONG}]), sequence_length=16, packing=False)
        ids = [*tokenizer.encode(self.LONG), tokenizer.eos_token_id]
        samples = as_filed(tokens)
        assert [token for sample in samples for token in sample.input_ids] == ids
        assert [token for sample in samples for token in sample.targets] == [*ids[1:], NO_TARGET]
        assert all(len(sample.input_ids) <= 16 for sample in samples)
        assert all(sample.position_ids[0] == 0 for sample in samples)

    def test_the_end_mark_of_a_text_that_fills_its_rows_makes_no_sample(self, tokens_of, write_rows, tokenizer):
        num_ids = len(tokenizer.encode(self.LONG))
        tokens = tokens_of(write_rows([{"text": self.LONG}]), sequence_length=num_ids, packing=False)
        assert len(tokens) == 1
        assert tokens.sample(0).targets[-1] == tokenizer.eos_token_id
        assert list(tokens.label_counts) == [num_ids]

    def test_a_text_that_just_fills_its_row_does_not_predict_the_next_one(
        self, tokens_of, write_rows, tokenizer, as_filed
    ):
        num_ids = len(tokenizer.encode(self.LONG)) + 1
        rows = write_rows([{"text": self.LONG}, {"text": "six dogs"}])
        tokens = tokens_of(rows, sequence_length=num_ids, packing=False)
        first = as_filed(tokens)[0]
        assert len(first.targets) == num_ids
        assert first.targets[-1] == NO_TARGET
        assert tokens.num_label_tokens == tokens.num_tokens - 2

    @pytest.mark.parametrize("row", [{"text": LONG}, {"prompt": "how?", "completion": LONG}])
    def test_truncate_keeps_the_front_and_counts_the_row(self, tokens_of, write_rows, row):
        kind = "text" if "text" in row else "completion"
        tokens = tokens_of(write_rows([row]), format=kind, overlong="truncate", sequence_length=16)
        assert len(tokens) == 1
        assert list(tokens.lengths) == [16]
        assert tokens.manifest["counts"]["truncated_rows"] == 1

    @pytest.mark.parametrize("row", [{"text": LONG}, {"prompt": "how?", "completion": LONG}])
    def test_fail_names_the_row(self, tokens_of, write_rows, row):
        kind = "text" if "text" in row else "completion"
        short = {"text": "six"} if kind == "text" else {"prompt": "a", "completion": "b"}
        with pytest.raises(DataError, match=r"rows.jsonl:2: longer than data.sequence_length \(16 tokens\)"):
            tokens_of(write_rows([short, row]), format=kind, overlong="fail", sequence_length=16)

    @pytest.mark.parametrize("kind", ["completion", "text"])
    def test_drop_leaves_the_row_out_and_counts_it(self, tokens_of, write_rows, kind):
        rows = {
            "completion": [{"prompt": "how?", "completion": self.LONG}, {"prompt": self.LONG, "completion": "six"}],
            "text": [{"text": self.LONG}, {"text": self.LONG}],
        }[kind]
        short = {"completion": {"prompt": "a", "completion": "b"}, "text": {"text": "six dogs"}}[kind]
        tokens = tokens_of(write_rows([*rows, short]), format=kind, overlong="drop", sequence_length=16)
        assert tokens.manifest["counts"]["dropped_rows"] == 2
        assert tokens.manifest["counts"]["truncated_rows"] == 0
        assert len(tokens) == 1
        assert tokens.manifest["counts"]["skipped_rows"] == 0

    def test_a_prompt_that_fills_the_sample_is_a_bad_row(self, tokens_of, write_rows):
        rows = write_rows([{"prompt": self.LONG, "completion": "six"}])
        with pytest.raises(DataError, match="in 1 row the prompt alone fills a sample of 16 tokens"):
            tokens_of(rows, format="completion", sequence_length=16)

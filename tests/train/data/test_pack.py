"""Which rows share a sample."""

import dataclasses
import itertools

import numpy as np
import pytest
from transformers import AutoTokenizer

from gangline.runs.job import ChatTemplateJob, LearnJob
from gangline.worker.data import NO_TARGET
from gangline.worker.data.tokens import mixed, pack
from tests.train import cases_loss
from tests.train.data.conftest import VOCAB_SIZE
from tests.train.tolerances import SAME_SUMS


@pytest.mark.parametrize("seed", range(20))
def test_every_row_once_and_no_sample_over_its_length(seed):
    numbers = np.random.default_rng(seed)
    capacity = int(numbers.integers(1, 300))
    lengths = numbers.integers(1, capacity + 1, size=int(numbers.integers(1, 400)))
    sample_of = pack(lengths, capacity)
    fill = np.bincount(sample_of, weights=lengths)
    assert len(sample_of) == len(lengths)
    assert fill.max() <= capacity
    assert fill.min() > 0, "samples are numbered without gaps"
    assert np.array_equal(sample_of, pack(lengths, capacity)), "the same lengths are packed the same way"


@pytest.mark.parametrize("seed", range(20))
def test_each_row_goes_where_it_leaves_the_least_room(seed):
    numbers = np.random.default_rng(seed)
    lengths = numbers.integers(1, 51, size=100)
    rooms = []
    expected = np.empty(100, dtype=int)
    for row in np.argsort(-lengths, kind="stable"):
        fitting = [room for room in rooms if room >= lengths[row]]
        if not fitting:
            rooms.append(50 - lengths[row])
        else:
            rooms[rooms.index(min(fitting))] -= lengths[row]
        expected[row] = len(rooms)
    fill = np.bincount(pack(lengths, 50), weights=lengths)
    assert sorted(50 - fill) == sorted(rooms)


def test_text_rows_fill_samples_to_99_percent():
    lengths = np.random.default_rng(0).integers(5, 200, size=20_000)
    sample_of = pack(lengths, 1024)
    assert lengths.sum() / ((sample_of.max() + 1) * 1024) > 0.99


def test_packed_rows_start_anew_and_do_not_predict_each_other(tokens_of, write_rows):
    rows = write_rows([{"text": text} for text in ("two dogs pull", "six dogs", "a seventh rests")])
    apart = tokens_of(rows, packing=False)
    packed = tokens_of(rows, packing=True)
    assert (len(apart), len(packed)) == (3, 1)
    sample = packed.sample(0)
    pieces = dict(documents(sample))
    singles = {tuple(one.input_ids): tuple(one.targets) for one in (apart.sample(i) for i in range(3))}
    assert pieces == singles
    assert all(targets[-1] == NO_TARGET for targets in pieces.values())
    assert packed.label_counts.sum() == apart.label_counts.sum() == (sample.targets != NO_TARGET).sum()


def test_packing_keeps_every_row_of_a_set_with_split_texts(tokens_of, write_rows):
    numbers = np.random.default_rng(3)
    rows = write_rows([{"text": "two dogs pull " * int(numbers.integers(1, 40))} for _ in range(50)])
    apart, packed = tokens_of(rows, packing=False), tokens_of(rows, packing=True)
    assert len(packed) < len(apart)
    assert packed.num_label_tokens == apart.num_label_tokens
    assert packed.lengths.max() <= 64
    for tokens in (apart, packed):
        samples = [tokens.sample(i) for i in range(len(tokens))]
        assert [len(sample.input_ids) for sample in samples] == list(tokens.lengths)
        assert [(sample.targets != NO_TARGET).sum() for sample in samples] == list(tokens.label_counts)
    ids = [np.sort(np.concatenate([t.sample(i).input_ids for i in range(len(t))])) for t in (apart, packed)]
    assert np.array_equal(*ids)


@pytest.mark.parametrize("packing", [True, False])
def test_the_first_samples_are_a_fair_choice_of_rows_sorted_by_length(tokens_of, write_rows, packing):
    rows = write_rows([{"text": "two dogs pull " * (1 + index // 50)} for index in range(400)])
    tokens = tokens_of(rows, packing=packing, sequence_length=256)
    starts = [np.flatnonzero(tokens.sample(i).position_ids == 0) for i in range(len(tokens))]
    rows_per_sample = np.array([len(found) for found in starts])
    lengths = tokens.lengths / rows_per_sample
    first = lengths[: len(lengths) // 3].mean()
    assert first == pytest.approx(lengths.mean(), rel=0.2)
    assert lengths[0] < lengths.max(), "longest first"


def test_the_numbers_of_samples_are_the_same_for_ever():
    assert list(mixed(8)) == [6, 1, 5, 7, 3, 0, 2, 4]
    assert all(sorted(mixed(count)) == list(range(count)) for count in (0, 1, 2, 1000))


# as newer templates: thinking in tags of its own, results of tools, a turn with an end
THOUGHTFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "how many dogs?"},
    {"role": "assistant", "reasoning_content": "two and three", "content": "six dogs", "weight": 0},
    {"role": "tool", "content": "a seventh rests"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "reasoning_content": "be kind", "content": "hello back"},
]
TALKS = [
    {"messages": TURNS},
    {"messages": [TURNS[1], {**TURNS[5], "content": "two dogs pull"}]},
    {"messages": [TURNS[0], *TURNS[4:]]},
]
PAIRS = [{"prompt": "how many dogs? " * count, "completion": "six dogs" * count} for count in (1, 2, 3)]
TASKS = [{"instruction": row["prompt"], "output": row["completion"]} for row in PAIRS]
ALL = LearnJob(weight_field=None)
FILE = ChatTemplateJob(name="mine.jinja", text="<s>" + THOUGHTFUL.replace("\n", "</s>"))
MASKS = {
    "all": (
        TALKS,
        {"format": "chat", "learn": ALL},
        "<think>two and three</think>six dogs<|end|>\n<think>be kind</think>hello back<|end|>\n",
    ),
    "weights of messages": (
        TALKS,
        {"format": "chat", "learn": LearnJob()},
        "<think>be kind</think>hello back<|end|>\n",
    ),
    "last thinking": (
        TALKS,
        {"format": "chat", "learn": dataclasses.replace(ALL, thinking="last")},
        "six dogs<|end|>\n<think>be kind</think>hello back<|end|>\n",
    ),
    "no thinking": (
        TALKS,
        {"format": "chat", "learn": dataclasses.replace(ALL, thinking="none")},
        "six dogs<|end|>\nhello back<|end|>\n",
    ),
    "other roles": (
        TALKS,
        {"format": "chat", "learn": dataclasses.replace(ALL, roles=("user", "tool"))},
        "how many dogs?<|end|>\na seventh rests<|end|>\nhello there<|end|>\n",
    ),
    "no end token": (
        TALKS,
        {"format": "chat", "learn": dataclasses.replace(ALL, end_token=False)},
        "<think>two and three</think>six dogs<think>be kind</think>hello back",
    ),
    "template of a file": (
        TALKS,
        {"format": "chat", "learn": ALL, "chat_template": FILE},
        "<think>two and three</think>six dogs<|end|></s><think>be kind</think>hello back<|end|></s>",
    ),
    "prompts as messages": (PAIRS, {"format": "chat", "learn": ALL}, "six dogs<|end|>\n"),
    "completion": (PAIRS, {"format": "completion"}, "six dogs</s>"),
    "completion without an end": (PAIRS, {"format": "completion", "learn": LearnJob(end_token=False)}, "six dogs"),
    "instruction": (TASKS, {"format": "instruction"}, "six dogs</s>"),
    "alpaca": (TASKS, {"format": "alpaca"}, "six dogs</s>"),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_learned_and_its_loss_and_gradients_are_the_same_packed_and_apart(
    pool, make_model, tokens_of, write_rows, as_filed, name
):
    rows, how, learned = MASKS[name]
    file, folder = write_rows(rows), make_model(template=THOUGHTFUL)
    options = {"folder": folder, "sequence_length": 512, "overlong": "fail", **how}
    apart, packed = (tokens_of(file, **options, packing=packing) for packing in (False, True))
    assert len(packed) < len(apart) == len(rows)
    assert all_documents(packed) == all_documents(apart)
    targets = as_filed(apart)[0].targets
    assert AutoTokenizer.from_pretrained(folder).decode(targets[targets != NO_TARGET]) == learned
    folders = [str(apart.folder), str(packed.folder)]
    found = pool(1).run(cases_loss.of_token_sets, folders=folders, vocab_size=VOCAB_SIZE)[0]
    assert max(found.values()) < SAME_SUMS


def all_documents(tokens):
    return sorted(piece for at in range(len(tokens)) for piece in documents(tokens.sample(at)))


def documents(sample):
    """(tokens, targets) of every document of a sample."""
    starts = [*np.flatnonzero(sample.position_ids == 0), len(sample.input_ids)]
    return [(tuple(sample.input_ids[a:b]), tuple(sample.targets[a:b])) for a, b in itertools.pairwise(starts)]

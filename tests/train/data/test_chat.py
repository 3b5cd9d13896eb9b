"""Conversations: loss on what the assistant says."""

import pytest
from transformers import AutoTokenizer

from gangline.errors import DataError
from gangline.runs.job import ChatTemplateJob, LearnJob
from gangline.worker.data import NO_TARGET
from gangline.worker.data.tokenise import stop_ids

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# as Qwen 3: what the assistant thought is left out of every turn but the last
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %} thought{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS_OUTSIDE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "how many dogs?"},
    {"role": "assistant", "content": "six dogs"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello back"},
]


@pytest.fixture
def chat(make_model, tokens_of, write_rows):
    def tokenise(template, messages=TALK, learn=LearnJob(), chat_template=None, **options):  # noqa: B008 - frozen
        folder = make_model(template=template, **options)
        how = {"format": "chat", "sequence_length": 256, "learn": learn, "chat_template": chat_template}
        tokens = tokens_of(write_rows([{"messages": messages}]), folder=folder, **how)
        return tokens.sample(0), AutoTokenizer.from_pretrained(folder)

    return tokenise


def learned(sample, tokenizer):
    return tokenizer.decode(sample.targets[sample.targets != NO_TARGET])


def test_without_generation_tags_the_turns_are_those_of_the_loop(chat):
    sample, tokenizer = chat(PLAIN)
    assert list(sample.input_ids) == list(tokenizer.apply_chat_template(TALK)["input_ids"])
    assert learned(sample, tokenizer) == "six dogs<|end|>\nhello back<|end|>\n"


def test_with_generation_tags_the_template_decides(chat):
    sample, tokenizer = chat(TAGGED)
    expected = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert list(sample.input_ids) == list(expected["input_ids"])
    mask = expected["assistant_masks"][1:]
    targets = [token if learns else NO_TARGET for token, learns in zip(expected["input_ids"][1:], mask, strict=True)]
    assert list(sample.targets) == [*targets, NO_TARGET]
    assert learned(sample, tokenizer) == "six dogs<|end|>hello back<|end|>"


def test_the_end_of_text_right_after_an_answer_is_learned_though_it_is_outside_the_tags(chat):
    sample, tokenizer = chat(EOS_OUTSIDE)
    assert learned(sample, tokenizer) == "six dogs</s>hello back</s>"
    assert tokenizer.decode(sample.input_ids).count("</s>") == 2


def test_a_conversation_that_ends_with_the_user_learns_no_end(chat):
    sample, tokenizer = chat(PLAIN, [*TALK, {"role": "user", "content": "and a seventh?"}])
    assert learned(sample, tokenizer) == "six dogs<|end|>\nhello back<|end|>\n"


def test_the_template_writes_bos_not_the_tokenizer(chat):
    sample, tokenizer = chat("<s>" + PLAIN, bos=True)
    assert tokenizer.decode(sample.input_ids).count("<s>") == 1


def test_a_sentencepiece_tokenizer_puts_no_space_of_its_own_before_an_answer(chat):
    sample, tokenizer = chat(PLAIN, spaces=True)
    assert learned(sample, tokenizer) == "six dogs<|end|> \nhello back<|end|> \n"
    prompt = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt)
    assert list(sample.input_ids)[: len(ids)] == ids, "the prompt must have the tokens that it has in use"


def test_a_turn_that_no_token_of_the_template_ends_gets_the_end_of_text(chat):
    sample, tokenizer = chat(PLAIN.replace("<|end|>", "(over)"))
    assert learned(sample, tokenizer) == "six dogs(over)\nhello back(over)\n</s>"


def test_without_end_token_neither_the_end_of_a_turn_nor_of_the_text_is_learned(chat):
    learn = LearnJob(end_token=False)
    assert learned(*chat(PLAIN, learn=learn)) == "six dogshello back"
    assert learned(*chat(PLAIN.replace("<|end|>", "(over)"), learn=learn)) == "six dogshello back"
    assert learned(*chat(EOS_OUTSIDE, learn=learn)) == "six dogshello back"


def test_the_template_of_the_job_counts_and_is_a_part_of_the_sets_name(chat):
    named = ChatTemplateJob(name="other", text=PLAIN.replace("<|end|>", "</s>"))
    sample, tokenizer = chat(PLAIN, chat_template=named)
    assert learned(sample, tokenizer) == "six dogs</s>\nhello back</s>\n"
    assert "<|end|>" not in tokenizer.decode(sample.input_ids)


def test_a_template_that_forgets_what_was_thought_is_taken_as_it_writes(chat):
    sample, tokenizer = chat(FORGETFUL)
    assert learned(sample, tokenizer) == "six dogs<|end|>hello back thought<|end|>"


def test_an_answer_in_use_is_over_where_a_turn_of_the_template_ends(make_model):
    tokenizer = AutoTokenizer.from_pretrained(make_model(template=PLAIN))
    assert stop_ids(tokenizer) == [tokenizer.convert_tokens_to_ids("<|end|>")]
    assert stop_ids(AutoTokenizer.from_pretrained(make_model(template=PLAIN.replace("<|end|>", "(over)")))) == []
    assert stop_ids(AutoTokenizer.from_pretrained(make_model())) == []


def test_a_template_that_is_none_is_refused_with_its_line(chat):
    with pytest.raises(DataError, match=r"data.chat_template: mine.*(?s:.)*line 2"):
        chat(PLAIN, chat_template=ChatTemplateJob(name="mine", text="\n{% for m in messages %}"))


def test_no_template_names_what_to_do(tokens_of, write_rows):
    with pytest.raises(DataError, match="no chat template") as caught:
        tokens_of(write_rows([{"messages": TALK}]), format="chat")
    assert "chat_template.jinja" in caught.value.fix
    assert "data.format: completion" in caught.value.fix


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "'messages' is a text, but not the JSON of a list of messages"),
        ([], "'messages' is not a list of messages"),
        ([{"from": "human", "value": "hello"}], "message 1 of 'messages' has no role"),
        ([{"role": "user", "content": None}], "message 1 of 'messages' has null as its content"),
        ([{"role": "user", "content": "hello"}], "no assistant message"),
        ([{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}], "refuses the messages.*only users"),
    ],
)
def test_messages_that_cannot_be_used(chat, messages, reason):
    template = PLAIN + "{% if messages[0].role == 'tool' %}{{ raise_exception('only users') }}{% endif %}"
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}"):
        chat(template, messages)

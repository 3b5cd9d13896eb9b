"""What is learned of a conversation, with small templates that make the trouble of large ones."""

import pytest

from gangline.formats import RowError
from gangline.runs.job import LearnJob
from gangline.worker.data.chat_template import ChatTemplate
from gangline.worker.data.conversations import Conversations

SPECIAL = ("</s>", "<end>", "<call>", "<over>")
PROMPT = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
LOOP = "{% for m in messages %}[{{ m.role }}]\n"
PLAIN = LOOP + "{{ m.content }}<end>\n{% endfor %}" + PROMPT

CALL = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Oslo", "days": 3}}}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text, **more):
    return {"role": "tool", "name": "sky", "tool_call_id": "c1", "content": text, **more}


TWO = [user("one"), said("first"), user("two"), said("second")]
CALLED = [user("sky?"), said(None, tool_calls=[CALL]), tool("rain"), said("it rains")]


def ending(text):
    return next((token for token in SPECIAL if text.endswith(token)), None)


def read(template, messages, tools=None, **learn):
    """(the whole text, the learned parts, what the conversation is)"""
    compiled = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    found = Conversations(compiled, LearnJob(**learn), eos="</s>", ending=ending)(messages, tools)
    text = "".join(part.text for part in found.segments)
    return text, [part.text for part in found.segments if part.learned], found


def learned(template, messages, **learn):
    return read(template, messages, **learn)[1]


def test_an_answer_begins_after_its_prompt_and_holds_its_end():
    text, parts, found = read(PLAIN, TWO)
    assert text == "[user]\none<end>\n[assistant]\nfirst<end>\n[user]\ntwo<end>\n[assistant]\nsecond<end>\n"
    assert parts == ["first<end>\n", "second<end>\n"]
    assert not found.open


def test_equal_words_of_two_speakers_are_told_apart():
    assert learned(PLAIN, [user("no"), said("no"), user("no"), said("no")]) == ["no<end>\n", "no<end>\n"]


def test_thinking_that_is_dropped_from_earlier_turns_is_no_hindrance():
    forgets = (
        LOOP + "{% set c = m.content %}{% if not loop.last and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}<end>\n{% endfor %}" + PROMPT
    )
    thought = [user("a"), said("<think>\nhm\n</think>\n\nfirst"), user("b"), said("<think>\noh\n</think>\n\nsecond")]
    text, parts, found = read(forgets, thought)
    assert parts == ["first<end>\n", "<think>\noh\n</think>\n\nsecond<end>\n"]
    assert "hm" not in text
    assert found.notes == ("the template leaves out thinking of earlier turns",)


def test_trimmed_words_and_a_system_message_inside_the_first_turn():
    trims = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content ~ '\n\n' %}{% set ms = messages[1:] %}"
        "{% else %}{% set s = '' %}{% set ms = messages %}{% endif %}"
        "{% for m in ms %}[{{ m.role }}]\n{{ (s if loop.first else '') ~ m.content | trim }}<end>\n{% endfor %}"
        + PROMPT
    )
    system = {"role": "system", "content": "be kind"}
    text, parts, _ = read(trims, [system, user("  one "), said("\n first  ")])
    assert text == "[user]\nbe kind\n\none<end>\n[assistant]\nfirst<end>\n"
    assert parts == ["first<end>\n"]


def test_a_template_that_asks_for_the_last_message():
    last = LOOP + "{{ m.content }}{{ '<over>' if loop.last else '<end>' }}{% endfor %}" + PROMPT
    assert learned(last, TWO) == ["first<end>", "second<over>"]


def test_a_look_at_every_message_before_the_loop_learns_no_white_space():
    looks = "{% for m in messages %}\n {% if m.role == 'user' %} {% endif %}\n{% endfor %}" + PLAIN
    assert learned(looks, TWO) == ["first<end>\n", "second<end>\n"]


CALLS = (
    LOOP + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}<end>\n{% endfor %}" + PROMPT
)


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_are_learned_and_answers_of_tools_are_not(content, as_text):
    function = CALL["function"] | ({"arguments": '{"city": "Oslo", "days": 3}'} if as_text else {})
    messages = [user("sky?"), said(content, tool_calls=[CALL | {"function": function}]), tool("rain"), said("it rains")]
    text, parts, found = read(CALLS, messages)
    assert parts == ['<call>sky {"city": "Oslo", "days": 3}<end>\n', "it rains<end>\n"]
    assert "[tool]\nrain<end>\n" in text
    assert found.notes == ()


def test_a_template_that_wants_arguments_as_text_and_null_as_content_gets_them():
    picky = (
        LOOP + "{% if m.tool_calls is defined %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "<call>{{ '(' + c.function.arguments + ')' }}{% endfor %}{% else %}{{ raise_exception('null!') }}{% endif %}"
        "{% else %}{{ '' + m.content }}{% endif %}<end>\n{% endfor %}" + PROMPT
    )
    assert learned(picky, CALLED)[0] == '<call>({"city": "Oslo", "days": 3})<end>\n'


def test_a_template_that_wants_parts_gets_them():
    parts = LOOP + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<end>\n"
    assert learned(parts + "{% endfor %}" + PROMPT, TWO) == ["first<end>\n", "second<end>\n"]


def test_tool_calls_that_the_template_has_no_words_for_are_named():
    _, parts, found = read(PLAIN, CALLED)
    assert parts == ["<end>\n", "it rains<end>\n"]
    assert found.notes == ("the template leaves out tool calls",)


def test_answers_of_tools_inside_the_turn_of_the_assistant_stay_out():
    inside = (
        "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]\n{{ m.content or '' }}"
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% set i = loop.index0 %}{% for k in range(i + 1, messages | length) %}"
        "{% set other = messages[k] %}{% if other.role == 'tool' %}(got: {{ other.content }}){% endif %}{% endfor %}"
        "{% endif %}<end>\n{% endif %}{% endfor %}" + PROMPT
    )
    text, parts, _ = read(inside, CALLED)
    assert '<call>{"city": "Oslo", "days": 3}(got: rain)<end>' in text
    assert parts == ['<call>{"city": "Oslo", "days": 3}', "<end>\n", "it rains<end>\n"]


def test_messages_that_are_reached_by_number():
    numbered = "{% for i in range(messages | length) %}{% set m = messages[i] %}" + PLAIN.split("%}", 1)[1]
    assert learned(numbered, TWO) == ["first<end>\n", "second<end>\n"]


def test_answers_that_are_written_elsewhere_are_refused_not_guessed():
    late = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.role ~ ': ' ~ m.content ~ '\n' %}"
        "{% endfor %}{{ ns.t }}"
    )
    with pytest.raises(RowError, match=r"not certain: the template writes message 1.*outside.*\{% generation %\}"):
        read(late, [said("first"), user("one")])


def test_words_of_the_answer_that_another_message_writes_are_refused():
    quotes = LOOP + "{{ m.content }}{% if not loop.first %}({{ messages[loop.index0 - 1].content }}){% endif %}<end>\n"
    with pytest.raises(RowError, match="among the words of message"):
        read(quotes + "{% endfor %}" + PROMPT, TWO)


def test_a_template_that_counts_letters_is_refused():
    counts = LOOP + "{{ m.content }} {{ m.content | length }}<end>\n{% endfor %}" + PROMPT
    with pytest.raises(RowError, match="looks at letters"):
        read(counts, TWO)


def test_generation_blocks_decide_where_there_are_some():
    tagged = (
        "{% for m in messages %}{% if m.role == 'assistant' %}[assistant]\n{% generation %}{{ m.content }}"
        "{% endgeneration %}<end>\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}" + PROMPT
    )
    assert learned(tagged, TWO) == ["first", "second"]


def test_the_end_of_text_after_the_last_answer_is_learned_wherever_the_template_writes_it():
    assert learned(PLAIN + "{{ eos_token }}", TWO) == ["first<end>\n", "second<end>\n</s>"]


@pytest.mark.parametrize(
    ("template", "is_open"),
    [(PLAIN, False), (PLAIN.replace("<end>", ""), True), (PLAIN.replace("<end>", "(over)"), True)],
)
def test_only_a_turn_without_a_token_at_its_end_is_open(template, is_open):
    assert read(template, TWO)[2].open == is_open
    assert not read(template, [*TWO, user("three")])[2].open
    assert not read(template, TWO, end_token=False)[2].open


def test_the_thinking_that_a_prompt_opens_is_learned_with_the_answer():
    opens = PLAIN.replace("[assistant]\n{% endif %}", "[assistant]\n<think>\n{% endif %}")
    assert learned(opens, [user("a"), said("<think>\nhm\n</think>\n\nfirst")]) == [
        "<think>\nhm\n</think>\n\nfirst<end>\n"
    ]


# --- data.learn


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ("all", ["<think>\nhm\n</think>\n\nfirst<end>\n", "<think>\noh\n</think>\n\nsecond<end>\n"]),
        ("last", ["first<end>\n", "<think>\noh\n</think>\n\nsecond<end>\n"]),
        ("none", ["first<end>\n", "second<end>\n"]),
    ],
)
def test_thinking(thinking, expected):
    inline = [user("a"), said("<think>\nhm\n</think>\n\nfirst"), user("b"), said("<think>\noh\n</think>\n\nsecond")]
    assert learned(PLAIN, inline, thinking=thinking) == expected
    apart = PLAIN.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
    )
    messages = [user("a"), said("first", reasoning_content="hm"), user("b"), said("second", reasoning="oh")]
    assert learned(apart, messages, thinking=thinking) == expected


def test_thinking_without_an_end_that_is_known_is_refused_where_it_matters():
    fused = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content or '' }} {{ m.content }}")
    messages = [user("a"), said("first", reasoning_content="hm")]
    assert learned(fused, messages) == ["hm first<end>\n"]
    with pytest.raises(RowError, match=r"learn\.thinking: where the thinking of message 2 ends"):
        learned(fused, messages, thinking="none")


def test_roles():
    messages = [{"role": "system", "content": "sys"}, *CALLED]
    assert learned(CALLS, messages, roles=("user",)) == ["sky?<end>\n"]
    assert learned(CALLS, messages, roles=("tool", "system"), end_token=False) == ["sys", "rain"]
    assert len(learned(CALLS, messages, roles=("assistant", "tool"))) == 3


def test_a_message_of_weight_0_is_not_learned_and_the_template_does_not_see_the_key():
    messages = [user("one"), said("first", weight=0), user("two", weight=1), said("second", weight=1.0)]
    assert learned(PLAIN, messages) == ["second<end>\n"]
    assert learned(PLAIN, messages, weight_field=None) == ["first<end>\n", "second<end>\n"]
    assert learned(PLAIN, [user("a"), said("b", train=False), said("c")], weight_field="train") == ["c<end>\n"]
    assert "weight" not in read(PLAIN.replace("m.content", "m"), messages)[0]


def test_a_weight_between_is_refused_by_name():
    with pytest.raises(RowError, match=r"message 2 has weight 0\.5; a message is learned \(1\) or not \(0\)"):
        learned(PLAIN, [user("one"), said("first", weight=0.5)])


def test_end_token_false_leaves_out_what_ends_a_turn():
    assert learned(PLAIN, TWO, end_token=False) == ["first", "second"]
    assert learned(CALLS, CALLED, end_token=False) == ['<call>sky {"city": "Oslo", "days": 3}', "it rains"]
    assert learned(PLAIN + "{{ eos_token }}", TWO, end_token=False) == ["first", "second"]


# --- templates are programs of strangers


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{{ messages.pop() }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "refuses the messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses the messages"),
    ],
)
def test_a_template_that_fails_or_reaches_out_refuses_the_row(template, reason):
    with pytest.raises(RowError, match=reason):
        read(template, TWO)


def test_a_row_with_the_characters_of_marks_is_refused():
    with pytest.raises(RowError, match=r"U\+FDD0"):
        read(PLAIN, [user("one \ufdd05:0\ufdd1"), said("first")])


def test_a_turn_that_begins_unlike_the_prompt_for_it_is_refused():
    unlike = PLAIN.replace("[assistant]", "[bot]")
    with pytest.raises(
        RowError, match=r"begins message 2 with '\[assistant\]\\n', and asks for an answer with '\[bot\]"
    ):
        read(unlike, TWO)


def test_a_template_that_prints_what_it_is_given_gets_no_lists():
    text, parts, _ = read(LOOP + "{{ m.content if m.role == 'assistant' else 'hm' }}<end>\n{% endfor %}" + PROMPT, TWO)
    assert parts == ["first<end>\n", "second<end>\n"]
    assert "type" not in text


def test_answers_in_the_prompt_of_a_row_are_given_and_not_learned():
    messages = [user("one", gangline_given=True), said("first", gangline_given=True), said("second")]
    text, parts, _ = read(PLAIN.replace("{{ m.content }}", "{{ m.content }} {{ m.gangline_given }}"), messages)
    assert parts == ["second <end>\n"]
    assert "True" not in text

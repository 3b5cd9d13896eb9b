"""Requests and answers in OpenAI's form, without a model."""

import json

import pytest

from gangline.errors import RunFailed, UsageError
from gangline.worker.serving.engine import Piece, QueueFull
from gangline.worker.serving.openai_form import AnswerForm, Refusal, read_calls, read_request, refusal_of

HELLO = [{"role": "user", "content": "tea?"}]
LAST = Piece(finish="stop", num_prompt_tokens=3, num_answer_tokens=2)
TOOL = {"type": "function", "function": {"name": "brew"}}


def read(*, is_chat=True, **body):
    asked = {"model": "m", **({"messages": HELLO} if is_chat else {"prompt": "tea"}), **body}
    return read_request(json.dumps(asked).encode(), ["m", "other"], is_chat=is_chat)


def refused(**body):
    with pytest.raises(Refusal) as caught:
        read(**body)
    return caught.value


def test_a_request_is_read_with_the_forms_own_defaults():
    question = read().question
    assert (question.temperature, question.top_p, question.max_tokens) == (1.0, 1.0, None)
    assert read(is_chat=False).question.max_tokens == 16


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"model": "m"', "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "m", "\\ud800": 1}', "surrogate"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body, word):
    with pytest.raises(Refusal) as caught:
        read_request(body, ["m"], is_chat=True)
    assert (caught.value.status, word in caught.value.message) == (400, True)


def test_what_says_nothing_about_the_answer_is_passed_over():
    assert read(user="me", n=1, logprobs=False, frequency_penalty=0.0, stop=None).question.stop == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temprature": 0}, "temprature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": ["tea?"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_key(body, param):
    refusal = refused(**body)
    assert (refusal.status, refusal.param) == (400, param)
    assert refusal.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff\xfe"])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(Refusal) as caught:
        read_request(body, ["m"], is_chat=True)
    assert caught.value.status == 400


def test_an_unknown_model_is_told_those_that_are_there():
    refusal = refused(model="nobody")
    assert (refusal.status, refusal.code) == (404, "model_not_found")
    assert "m, other" in refusal.message


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "te"}, {"type": "text", "text": "a?"}]
    assert read(messages=[{"role": "user", "content": parts}]).question.messages[0]["content"] == "tea?"


def test_arguments_of_an_earlier_call_come_to_the_template_as_data():
    call = {"id": "1", "type": "function", "function": {"name": "brew", "arguments": '{"cups": 2}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    found = read(messages=messages).question.messages[1]
    assert found["tool_calls"][0]["function"] == {"name": "brew", "arguments": {"cups": 2}}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full"), 429),
        (UsageError("the prompt is too long for this model"), 400),
        (RunFailed("the endpoint is closing"), 503),
        (RunFailed("the answer failed"), 500),
    ],
)
def test_an_error_of_an_engine_has_its_status(error, status):
    assert refusal_of(error).status == status


def test_calls_of_tools_are_read_out_of_the_text():
    said = 'Yes.\n<tool_call>\n{"name": "brew", "arguments": {"cups": {"n": 2}}}\n</tool_call>'
    text, calls = read_calls(said)
    assert text == "Yes."
    assert calls[0]["function"] == {"name": "brew", "arguments": '{"cups": {"n": 2}}'}


@pytest.mark.parametrize("said", ["<tool_call>{nonsense}</tool_call>", '<tool_call>{"name": 1', "plain"])
def test_what_is_no_call_stays_in_the_text(said):
    assert read_calls(said) == (said, [])


def test_an_answer_with_a_call_ends_for_that_reason_whole_and_as_a_stream():
    asked = read(tools=[TOOL])
    said = '<tool_call>{"name": "brew", "arguments": {}}</tool_call>'
    whole = AnswerForm(asked).whole(said, LAST)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    parts = AnswerForm(asked).end(said, LAST)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, "tool_calls"]
    assert parts[0]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


def test_a_stream_tells_its_tokens_where_it_is_asked_to():
    parts = AnswerForm(read(stream=True, stream_options={"include_usage": True})).end("", LAST)
    assert parts[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert parts[-1]["choices"] == []

"""What a row means: every form of it that people have, and what is wrong with the others."""

from __future__ import annotations

import json

import pytest

from gangline.formats import (
    FORMATS,
    GIVEN,
    DataFormat,
    RowError,
    Segment,
    check_row,
    expected_columns,
    fields_of,
    instruction_prompt,
    read_messages,
    read_values,
)

ASKED = {"role": "user", "content": "how many dogs?"}
SAID = {"role": "assistant", "content": "six"}
SHARE_GPT = {"messages": "conversations", "role": "from", "content": "value"}
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "tool_calls"}


def chat(row, fields=None, speakers=None):
    values = read_values("chat", fields_of("chat", fields or {}), row, speakers)
    return FORMATS["chat"].messages(values)


def refused(row, name="chat", fields=None, speakers=None, learned=("assistant",)) -> str:
    with pytest.raises(RowError) as caught:
        check_row(name, fields_of(name, fields or {}), row, speakers, learned)
    return str(caught.value)


class TestForms:
    @pytest.mark.parametrize(
        "row",
        [
            {"messages": [ASKED, SAID]},
            {"messages": json.dumps([ASKED, SAID])},
            {"messages": [{**ASKED, "name": None, "tool_calls": None}, {**SAID, "reasoning_content": None}]},
            {"messages": [ASKED, SAID], "prompt": "another text", "system": "", "tools": None},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "how many "}, "dogs?"]}, SAID]},
            {"instruction": "how many dogs?", "output": "six"},
            {"instruction": "how many dogs?", "input": "", "output": "six", "history": [], "system": None},
        ],
    )
    def test_one_conversation_in_many_forms(self, row):
        assert chat(row) == [ASKED, SAID]

    def test_share_gpt_by_its_names(self):
        turns = [{"from": "human", "value": "how many dogs?"}, {"from": "gpt", "value": "six", "weight": 0}]
        found = chat({"conversations": turns, "system": "count"}, SHARE_GPT, SPEAKERS)
        assert found == [{"role": "system", "content": "count"}, ASKED, {**SAID, "weight": 0}]

    def test_share_gpt_with_calls_as_json(self):
        call = {"name": "count", "arguments": {"of": "dogs"}}
        turns = [
            {"from": "human", "value": "how many dogs?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "6"},
            {"from": "gpt", "value": "six"},
        ]
        assert chat({"conversations": turns}, SHARE_GPT, SPEAKERS) == [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "6"},
            SAID,
        ]

    @pytest.mark.parametrize("form", ["text", "messages", "json"])
    def test_of_prompt_and_completion_only_the_completion_is_marked_as_learned(self, form):
        row = {"prompt": [ASKED], "completion": [SAID]}
        if form == "text":
            row = {"prompt": ASKED["content"], "completion": SAID["content"]}
        if form == "json":
            row = {name: json.dumps(value) for name, value in row.items()}
        assert chat(row) == [{**ASKED, GIVEN: True}, SAID]

    def test_a_text_that_begins_with_a_bracket_is_still_a_text(self):
        assert chat({"prompt": "[sic] dogs", "completion": "six"})[0]["content"] == "[sic] dogs"

    def test_a_prompt_with_answers_of_its_own(self):
        given = [{**each, GIVEN: True} for each in (ASKED, SAID, ASKED)]
        assert chat({"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}) == [*given, SAID]

    def test_instruction_rows_by_the_chat_template(self):
        row = {"instruction": "count", "input": "dogs", "output": "six", "system": "be brief", "history": [["a", "b"]]}
        assert chat(row) == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "count\ndogs"},
            SAID,
        ]

    def test_instruction_rows_by_their_headings(self):
        row = {
            "instruction": "count",
            "input": "dogs",
            "output": "six",
            "system": "be brief",
            "history": '[["a", "b"]]',
        }
        values = read_values("instruction", fields_of("instruction", {}), row)
        assert FORMATS["instruction"].segments(values) == (
            Segment(f"be brief\n\n{instruction_prompt('a')}b\n\n{instruction_prompt('count', 'dogs')}", learned=False),
            Segment("six", learned=True),
        )

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_has_one_name(self, key):
        assert chat({"messages": [ASKED, {**SAID, key: "1, 2, ..."}]})[1] == {**SAID, "reasoning_content": "1, 2, ..."}

    def test_reasoning_among_the_parts_of_a_content(self):
        parts = [{"type": "thinking", "thinking": "1, 2"}, {"type": "text", "text": "six"}]
        assert chat({"messages": [ASKED, {"role": "assistant", "content": parts}]})[1] == {
            **SAID,
            "reasoning_content": "1, 2",
        }

    @pytest.mark.parametrize(
        "calls",
        [
            [{"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"of": "dogs"}'}}],
            [{"id": "c1", "name": "count", "arguments": '{"of": "dogs"}'}],
            '[{"id": "c1", "function": {"name": "count", "arguments": "{\\"of\\": \\"dogs\\"}"}}]',
        ],
    )
    @pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
    def test_tool_calls_need_no_content(self, calls, content):
        found = chat({"messages": [ASKED, {"role": "assistant", "tool_calls": calls, **content}, SAID]})[1]
        function = {"name": "count", "arguments": '{"of": "dogs"}'}
        assert found == {
            "role": "assistant",
            "content": content.get("content"),
            "tool_calls": [{"type": "function", "id": "c1", "function": function}],
        }

    def test_calls_of_the_old_api(self):
        call = {"name": "count", "arguments": "{}"}
        assert chat({"messages": [ASKED, {"role": "assistant", "content": None, "function_call": call}]})[1] == {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        }

    @pytest.mark.parametrize("form", [lambda tools: tools, json.dumps, lambda tools: tools[0]])
    def test_tools_as_they_are_or_as_json(self, form):
        tools = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
        row = {"messages": [ASKED, SAID], "tools": form(tools)}
        assert read_values("chat", fields_of("chat", {}), row)["tools"] == tools

    def test_a_row_is_not_changed(self):
        row = {"messages": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b", "thinking": "c"}]}
        before = json.dumps(row)
        chat(row, {"role": "from", "content": "value"})
        assert json.dumps(row) == before


class TestMistakes:
    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ([], "'messages' is not a list of messages"),
            ("hello", "'messages' is a text, but not the JSON of a list of messages"),
            (7, "'messages' is not a list of messages"),
            (["hello"], "message 1 of 'messages' is a str; expected {'role'"),
            ([{"content": "a"}], "message 1 of 'messages' has no role; it has 'content'"),
            ([{"role": 7, "content": "a"}], "message 1 of 'messages' has a role that is no text: 7"),
            (
                [{"from": "human", "value": "a"}],
                "data.fields: {role: from, content: value} and data.roles: {human: user",
            ),
            ([ASKED, {"role": "assistant"}], "message 2 of 'messages' has no content; it has 'role'"),
            ([ASKED, {"role": "assistant", "content": None}], "message 2 of 'messages' has null as its content"),
            (
                [ASKED, {"role": "assistant", "content": 7}],
                "a content that is a int, neither a text nor a list of parts",
            ),
            ([ASKED, {"role": "assistant", "content": "\ud800"}], "half a surrogate pair"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, SAID],
                "the type 'image_url'; gang",
            ),
            ([{"role": "user", "content": [7]}, SAID], "message 1 of 'messages' has a part of the type 'int'"),
            ([{"role": "user", "content": [{"type": "text"}]}, SAID], "a part of the type 'text' without a text"),
            ([ASKED, {"role": "assistant", "tool_calls": [{"id": 1}]}], "a tool call without the name of a function"),
            ([ASKED, {"role": "assistant", "tool_calls": "count()"}], "but not the JSON of a list of tool calls"),
            ([ASKED, {"role": "assistant", "tool_calls": [{"name": "a", "arguments": 7}]}], "neither an object nor"),
            ([ASKED, {**SAID, "thinking": ["a"]}], "message 2 of 'messages' has reasoning that is a list"),
            ([ASKED], "no assistant message, so there is nothing to learn; roles are 'user'"),
            ([ASKED, {"role": "assistant", "content": ""}], "every assistant message is empty"),
        ],
    )
    def test_messages_that_are_off_are_named(self, messages, reason):
        assert reason in refused({"messages": messages})

    def test_those_who_are_learned_need_not_be_the_assistant(self):
        row, fields = {"messages": [ASKED]}, fields_of("chat", {})
        assert check_row("chat", fields, row, {}, ("user", "tool")) == len(ASKED["content"])
        assert "no tool or assistant message" in refused(row, learned=("tool", "assistant"))
        assert "every user message is empty" in refused({"messages": [{**ASKED, "content": ""}]}, learned=("user",))

    @pytest.mark.parametrize(
        ("row", "name", "reason"),
        [
            ({"prompt": [ASKED], "completion": [ASKED]}, "chat", "no assistant message"),
            ({"prompt": [ASKED], "completion": [SAID]}, "completion", "not a text; data.format: chat reads messages"),
            ({"prompt": "a", "completion": ""}, "chat", "every assistant message is empty"),
            ({"prompt": "a", "completion": ""}, "completion", "'completion' is empty"),
            ({"prompt": "a"}, "chat", "no field 'completion'; there are 'prompt'"),
            ({"instruction": "a", "output": 7}, "chat", "'output' is a int, not a text"),
            ({"messages": [ASKED, SAID], "tools": "count"}, "chat", "'tools' is a text, but not the JSON of a list of"),
            ({"messages": [ASKED, SAID], "tools": ["count"]}, "chat", "'tools' is not a list of tools"),
            (
                {"instruction": "a", "output": "b", "history": [["c"]]},
                "instruction",
                "turn 1 of 'history' is not a pair",
            ),
            (
                {"messages": [{"role": "system", "content": "a"}, SAID], "system": "b"},
                "chat",
                "a system message, and a",
            ),
            ({"text": None}, "text", "'text' is null"),
            ({"txt": "a"}, "text", "there are 'txt'; did you mean data.fields: {text: txt}?"),
            ({"question": "a", "answer": "b"}, "completion", "data.fields: {prompt: question, completion: answer}?"),
            ({"question": "a", "answer": "b"}, "chat", "mean data.fields: {prompt: question, completion: answer}?"),
            ({"question": "a", "answr": "b", "id": 1}, "completion", "did you mean data.fields: {prompt: question}?"),
            ({"instruction": "a", "response": "b"}, "instruction", "did you mean data.fields: {output: response}?"),
            (
                {"id": 1, "conversations": [{"from": "human", "value": "a"}]},
                "chat",
                "did you mean data.fields: {messages: conversations, role: from, content: value}?",
            ),
        ],
    )
    def test_rows_that_are_off_are_named(self, row, name, reason):
        assert reason in refused(row, name)

    def test_unknown_speakers_are_named(self):
        turns = [{"from": "human", "value": "a"}, {"from": "bard", "value": "b"}]
        row = {"conversations": turns}
        assert "roles are 'user', 'bard' (data.roles: {bard: assistant})" in refused(row, "chat", SHARE_GPT, SPEAKERS)
        assert "roles are 'human', 'bard' (data.roles: {human: user, bard: a" in refused(row, "chat", SHARE_GPT)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("text", "'text'"),
        ("instruction", "'instruction', 'answer'"),
        ("chat", "'messages', or 'prompt', 'completion', or 'instruction', 'answer'"),
    ],
)
def test_the_columns_that_a_row_has_to_have(name, columns):
    assert expected_columns(name, fields_of(name, {"output": "answer"})) == columns


def test_a_format_of_ones_own_reads_messages_as_before():
    assert read_messages("talk", [ASKED, SAID]) == [ASKED, SAID]
    with pytest.raises(ValueError, match="speaker: not among the roles talk"):
        DataFormat(roles=("talk",), conversations=frozenset({"speaker"}), messages=lambda row: row["talk"])

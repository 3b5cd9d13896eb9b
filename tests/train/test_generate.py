"""Talking with a model: one answer, a chat, from a folder, an adapter or a checkpoint."""

import pytest

from tests.train import cases_generate

pytestmark = pytest.mark.rotating


@pytest.fixture
def run(pool, tmp_path):
    return lambda case, **arguments: pool(1).run(case, folder=str(tmp_path), **arguments)[0]


def test_the_likeliest_answer_is_the_one_of_plain_transformers(run):
    answer, expected = run(cases_generate.greedy_answer)
    assert answer == expected
    assert answer


def test_an_answer_is_repeated_by_its_seed_and_only_by_it(run):
    first, again, other = run(cases_generate.answers_by_seed, seeds=[3, 3, 4])
    assert first == again
    assert first != other


@pytest.mark.parametrize("merged", [False, True])
def test_a_checkpoint_and_its_export_say_the_same(run, merged):
    said = run(cases_generate.same_model_three_ways, merged=merged)
    assert len(set(said["answers"])) == 1
    assert said["base"] not in said["answers"]


@pytest.mark.parametrize(
    ("data_format", "template", "plain", "form", "prompt"),
    [
        ("text", True, False, "chat", "<user>tea?<assistant>"),
        ("chat", True, False, "chat", "<user>tea?<assistant>"),
        ("chat", True, True, "plain", "tea?"),
        ("text", False, False, "plain", "tea?"),
        ("completion", True, False, "plain", "tea?"),
        ("instruction", True, False, "instruction", "### Instruction:\ntea?\n\n### Response:\n"),
        ("instruction", False, True, "plain", "tea?"),
    ],
)
def test_a_model_is_spoken_to_as_it_was_trained(run, data_format, template, plain, form, prompt):
    assert run(cases_generate.forms, data_format=data_format, template=template, plain=plain) == [form, prompt]


@pytest.mark.parametrize(("data_format", "form"), [("instruction", "instruction"), ("completion", "plain")])
def test_an_export_remembers_how_it_was_trained(run, data_format, form):
    assert run(cases_generate.form_of_an_export, data_format=data_format) == form


@pytest.mark.parametrize("merged", [False, True])
def test_a_chat_template_of_the_job_is_used_and_exported(run, merged):
    prompts, ends = run(cases_generate.own_template, merged=merged)
    assert prompts == ["<user>tea?<assistant>"] * 2
    assert ends == ([1] if merged else None)


def test_a_chat_remembers_what_was_said(run):
    said = run(cases_generate.conversation, lines=["one\n", "\n", "two\n"])
    first, second = said["prompts"]
    answer = said["answers"].split("\n")[0]
    assert first == "<user>one<assistant>"
    assert second.startswith("<user>one<assistant>")
    assert second.endswith("<user>two<assistant>")
    assert said["code"] == 0
    assert answer
    assert "Ctrl-D" in said["talk"]


def test_a_long_chat_forgets_its_oldest_turns(run):
    said = run(cases_generate.conversation, lines=[f"{letter * 40}\n" for letter in "abc"])
    assert "a" * 40 not in said["prompts"][-1]
    assert said["prompts"][-1].endswith(f"<user>{'c' * 40}<assistant>")


def test_a_line_that_is_too_long_is_refused_and_the_chat_goes_on(run):
    said = run(cases_generate.conversation, lines=["x" * 200 + "\n", "tea\n"])
    assert "too long for this model" in said["talk"]
    assert said["prompts"] == ["<user>tea<assistant>"]


def test_ctrl_c_ends_the_answer(run):
    assert run(cases_generate.interrupted) == {"said": "ab", "pieces": ["ab"]}


def test_a_model_cannot_steer_the_terminal(pool):
    assert pool(1).run(cases_generate.cleaned)[0] == ["red [31m31m tea\n\tpot"]


def test_one_answer_from_the_command_line(run):
    done = run(cases_generate.main, argv=["{base}", "--prompt", "tea", "--max-tokens", "8", "--temperature", "0"])
    assert done["code"] == 0
    assert done["out"].endswith("\n")
    assert len(done["out"].strip()) > 0


def test_a_chat_from_the_command_line_ends_with_its_input(run):
    done = run(cases_generate.main, argv=["{base}", "--chat", "--max-tokens", "4"], source="tea\n", template=True)
    assert done["code"] == 0
    assert done["err"].count("> ") == 2


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["{base}", "--chat", "--prompt", "tea"], "UsageError"),
        ([], "UsageError"),
        (["{base}", "--run", "{folder}", "--checkpoint", "{folder}"], "UsageError"),
        (["{base}", "--max-tokens", "0"], "UsageError"),
        (["{folder}/nowhere", "--prompt", "tea"], "ModelError"),
        (["--run", "{folder}/nowhere", "--checkpoint", "{folder}/nowhere", "--prompt", "tea"], "UsageError"),
    ],
)
def test_a_mistake_is_told_in_three_parts(run, argv, kind):
    error = run(cases_generate.main, argv=argv)
    assert error["kind"] == kind
    assert error["exit_code"] == 2
    assert error["seen"]
    assert error["fix"]


@pytest.mark.parametrize("merged", [False, True])
def test_a_tuned_model_and_its_base_answer_beside_each_other_and_the_chat_is_saved(run, merged):
    done, rows, (tuned, base) = run(cases_generate.beside_base, merged=merged)
    assert done["out"] == f"[tuned] {tuned}\n[base] {base}\n"
    assert tuned != base
    asked = {"role": "user", "content": "tea"}
    assert rows == [
        {"messages": [asked, {"role": "assistant", "content": said}], "model": name}
        for name, said in (("tuned", tuned), ("base", base))
    ]
    assert "written: " in done["err"]
    assert "is not written: File exists" in done["err"]
    assert "no file is named" in done["err"]


def test_an_answer_without_memory_is_told_in_a_clear_word_and_the_chat_goes_on(run):
    answers, talk = run(cases_generate.without_memory)
    assert "the device has no memory left for this answer" in talk
    assert "Traceback" not in talk
    first, second = answers.splitlines()
    assert first == second

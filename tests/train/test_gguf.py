"""A model for llama.cpp and Ollama: how its tokenizer is called there, and its template in Ollama's language.

Conversion itself, and the faults that its check finds, are in benchmarks/gguf_files.py, which downloads llama.cpp.
"""

import pytest

from tests.train import cases_gguf

MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRIMMED = MARKED.replace("{{ m.content }}", "{{ m.content[1:] }}")
NUMBERED = MARKED.replace("<|{{ m.role }}|>", "<|{{ m.role }} {{ loop.index }}|>")


@pytest.fixture
def run(pool, tmp_path):
    return lambda case, **arguments: pool(1).run(case, folder=str(tmp_path), **arguments)[0]


def test_a_pattern_has_llama_cpps_name_only_where_it_is_the_same_to_the_letter(run):
    done = run(cases_gguf.names)
    assert done["found"] == done["known"]
    assert set(done["errors"]) == {"llama.cpp has no name for how this tokenizer cuts text"}


def test_the_pattern_of_gpt2_is_known_as_the_library_writes_it(run):
    assert run(cases_gguf.of_tokenizers) == "gpt-2"


def test_a_template_with_text_around_each_message_is_written_for_ollama(run):
    assert run(cases_gguf.template, text=MARKED) == (
        "{{- range .Messages }}"
        '{{ if eq .Role "user" }}<|user|>\n{{ .Content }}</s>\n'
        '{{ else if eq .Role "system" }}<|system|>\n{{ .Content }}</s>\n'
        '{{ else if eq .Role "assistant" }}<|assistant|>\n{{ .Content }}</s>\n'
        "{{ end }}{{ end }}<|assistant|>\n"
    )


@pytest.mark.parametrize("text", [TRIMMED, NUMBERED, MARKED.replace("<|{", '"""{')])
def test_another_template_is_refused_and_not_written_nearly_right(run, text):
    done = run(cases_gguf.template, text=text)
    assert done["what"] == "no Modelfile is written, for the chat template has no form in Ollama's language"


def test_a_modelfile_names_the_file_and_where_answers_end(run):
    lines = run(cases_gguf.modelfile, text=MARKED).splitlines()
    assert lines[0] == "FROM ./model-f16.gguf"
    assert lines[-1] == 'PARAMETER stop "</s>"'


def test_stop_words_are_written_as_ollama_reads_them_or_refused(run):
    plain, slashed, *refused = run(cases_gguf.stops, words=["<|im_end|>", r"\end", 'a"b', "a\nb", "a\u200bb"])
    assert plain == 'PARAMETER stop "<|im_end|>"'
    assert slashed == r'PARAMETER stop "\end"'  # nothing is escaped: Ollama takes off the quotes alone
    assert all("cannot be written between quotes" in each for each in refused)
    assert all(each.startswith("no Modelfile is written, for it could not hold where answers end") for each in refused)


def test_a_folder_has_its_name_only_when_it_is_whole(run, tmp_path):
    seen, inside = run(cases_gguf.new_folders)
    half, failed, again, whole, error = seen
    assert half == again == [".out.PID"], "killed now, nothing would be taken for a whole export"
    assert (failed, whole, inside) == ([], ["out"], ["part"])
    assert error == f"{tmp_path / 'out'} is there already"

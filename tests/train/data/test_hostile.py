"""Text of data sets and templates of models are text: nothing of them is run (S18)."""

import random

import pytest
from transformers import AutoTokenizer

from gangline.errors import DataError

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch canary') }}",
    "{{ lipsum.__globals__['os'].system('touch canary') }}",
    "{{ (raise_exception.__globals__)['__builtins__'] }}",
    "{{ messages.append({'role': 'assistant', 'content': 'planted'}) }}",
    "{% for number in range(1000000000) %}x{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
)
PIECES = (
    "{{ 7 * 7 }}", "{% raise %}", "{% include '/etc/passwd' %}", "{# hidden #}", "<|assistant|>", "</s>", "$(touch canary)",
    "`touch canary`", "; touch canary", "\n", "\\", "'", '"', "\x1b[2J", "\x9b31m", "\u202e", "%s%n", "../../x", "-o", "é", " ",
)  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(make_model, tokens_of, write_rows, tmp_path, monkeypatch, escape):
    monkeypatch.chdir(tmp_path)
    rows = write_rows([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        tokens_of(rows, folder=make_model(template=PLAIN + escape), format="chat", sequence_length=256)
    assert not (tmp_path / "canary").exists()


def test_what_stands_in_rows_is_never_read_as_a_template_or_a_command(
    make_model, tokens_of, write_rows, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(18)
    texts = ["x" + "".join(chance.choices(PIECES[:3] + PIECES[6:], k=12)) for _ in range(300)]
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in texts]
    folder = make_model(template=PLAIN)
    tokens = tokens_of(write_rows(rows), folder=folder, format="chat", sequence_length=1024, packing=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoded = [tokenizer.decode(tokens.sample(number).input_ids) for number in range(len(texts))]
    assert sorted(decoded) == sorted(f"<|user|>q<|end|><|assistant|>{text}<|end|>" for text in texts)
    assert not (tmp_path / "canary").exists()

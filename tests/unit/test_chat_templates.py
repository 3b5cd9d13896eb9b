"""The templates that `data.chat_template` knows by name."""

import pytest

from gangline.chat_templates import CHAT_TEMPLATES
from gangline.runs.job import LearnJob
from gangline.worker.data.chat_template import ChatTemplate
from gangline.worker.data.conversations import Conversations

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many dogs?"},
    {"role": "assistant", "content": "Six."},
    {"role": "user", "content": "And sleds?"},
    {"role": "assistant", "content": "One."},
]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_of_every_template_the_answers_and_their_ends_are_learned_and_prompts_are_as_in_use(name):
    template = ChatTemplate(CHAT_TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    found = Conversations(template, LearnJob(), eos="</s>", ending=lambda _: None)(TALK)
    text, parts = "".join(part.text for part in found.segments), [part for part in found.segments if part.learned]
    assert [part.text.lstrip()[:4] for part in parts] == ["Six.", "One."]
    assert all(part.text.strip() not in {"Six.", "One."} for part in parts), "the end of a turn belongs to it"
    assert all(message["content"] in text for message in TALK)
    assert not any(message["content"] in part.text for part in parts for message in (TALK[0], TALK[1], TALK[3]))
    assert text.startswith(template.text(TALK[:2], prompt=True))


def test_documented_names_are_those_that_there_are():
    from gangline.config.job_model import DataWords

    said = DataWords.model_fields["chat_template"].description
    assert [name for name in CHAT_TEMPLATES if f"`{name}`" not in said] == []

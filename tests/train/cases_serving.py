"""What happens in the processes of test_serving."""

import threading
from pathlib import Path

import torch

from gangline.errors import GanglineError
from gangline.worker.generate import open_folder
from gangline.worker.serving.engine import Question, QueueFull, Served, open_engine
from gangline.worker.talk import Sampling
from tests.train.cases_generate import TEMPLATE, exported, model_folder

HELLO = [{"role": "user", "content": "tea?"}]


class Heard:
    """What an engine gave for one question. The engine stands still while `gate` is closed."""

    def __init__(self, gate=None):
        self.pieces, self.over, self.begun, self.gate = [], threading.Event(), threading.Event(), gate

    def __call__(self, piece):
        self.pieces.append(piece)
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if piece.finish or piece.error:
            self.over.set()

    def wait(self):
        assert self.over.wait(60)
        return self.pieces[-1]

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


def contract(folder, *, engine):
    """What every engine keeps of its promises, by promise."""
    opened = open_engine(engine, Served(name="m", folder=model_folder(folder), num_parallel=1, num_waiting=1))
    kept = {"models": list(opened.models)}

    def ask(gate=None, **changes):
        heard = Heard(gate)
        asked = {"model": "m", "text": "tea", "max_tokens": 8, "temperature": 0, **changes}
        return heard, opened.ask(Question(**asked), heard)

    def refusal(**changes):
        try:
            ask(**changes)
        except GanglineError as error:
            return type(error).__name__
        return "none"

    first, _ = ask()
    last = first.wait()
    again, _ = ask()
    again.wait()
    kept["begins without text"] = first.pieces[0].text == "" and first.pieces[0].num_prompt_tokens > 0
    kept["the same again"] = first.text == again.text
    kept["counted"] = last.num_answer_tokens == 8 and last.finish == "length"
    kept["too long"] = refusal(text="a" * 500)
    kept["no prompt"] = refusal(text="")
    gate = threading.Event()
    going, cancel = ask(gate, max_tokens=None)
    assert going.begun.wait(60)
    waiting, _ = ask()
    kept["full"] = refusal()
    cancel()
    cancel()
    gate.set()
    kept["goes on after a cancelled answer"] = waiting.wait().finish == "length"
    kept["a cancelled answer ends"] = not going.over.is_set()
    gate.clear()
    going, _ = ask(gate, max_tokens=None)
    assert going.begun.wait(60)
    waiting, _ = ask()
    closing = threading.Thread(target=opened.close)
    closing.start()
    while (closed := refusal()) == QueueFull.__name__:
        pass
    kept["closed"] = closed
    gate.set()
    closing.join(60)
    kept["closing ends answers"] = [type(each.wait().error).__name__ for each in (going, waiting)]
    return kept


def make(folder, *, template=False):
    """A model and an adapter over it."""
    base = model_folder(folder, template=TEMPLATE if template else None)
    exported(folder)
    return str(base), str(Path(folder) / "out")


def plain_answers(folder, *, prompts, num_tokens):
    """What `generate` of transformers says, greedily."""
    speaker = open_folder(Path(folder), plain=True)
    found = []
    for prompt in prompts:
        tokens = speaker.tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = speaker.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=1,
        )
        found.append(speaker.tokenizer.decode(ids[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


def adapter_answer(folder):
    """The adapter's own answer, as `gangline chat` gives it; what could steer a terminal is not in it."""
    speaker = open_folder(Path(folder), plain=True)
    return speaker.answer(HELLO, Sampling(max_tokens=12, temperature=0), lambda _: None)

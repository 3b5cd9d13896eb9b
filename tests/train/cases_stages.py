"""What happens in the processes of test_stages."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import torch

from gangline.errors import GanglineError
from gangline.worker.generate import open_folder
from gangline.worker.serving import stage_link, stage_model
from gangline.worker.serving.engine import Question, Served, open_engine
from gangline.worker.serving.stage_link import (
    LinkLost,
    LinkSilent,
    StageLink,
    await_call,
    call_stage,
    listen_for_stages,
)
from gangline.worker.serving.stage_model import StagePasses
from gangline.worker.serving.stage_worker import _StageWorker
from gangline.worker.serving.staged_engine import divide
from tests.train.cases_serving import KEY, STAGES, Heard, model_of_kind, with_stages
from tests.train.tiny import write_model, write_tokenizer


def make_deep(folder):
    """A model of five layers with a tokenizer, whose head is its table."""
    path = Path(folder) / "deep"
    write_model(path, num_hidden_layers=5, tie_word_embeddings=True)
    write_tokenizer(path)
    return str(path)


def kinds_in_stages(folder, *, kind):
    """Greedy answers of three stages beside those of one process, or the refusal; and what passed through each."""
    path = Path(folder) / "model"
    model = model_of_kind(kind)
    model.save_pretrained(path)
    write_tokenizer(path)
    served = Served(name="m", folder=path, num_parallel=3, context=100)
    prompts = ["tea", "an otter and " * 2, "x", "the sled", "cup " * 9]
    counts = count_tokens()
    try:
        staged = open_engine("stages", with_stages(served, 2))
    except GanglineError as error:
        for thread in STAGES:
            thread.join(60)
        return {"refused": error.seen}
    answers = [_ask(staged, prompt) for prompt in prompts]
    texts = [heard.wait() and heard.text for heard in answers]
    passed = sum(
        each.num_prompt_tokens + each.num_answer_tokens - 1 for each in (heard.pieces[-1] for heard in answers)
    )
    staged.close()
    alone = open_engine("transformers", served)
    expected = [_ask(alone, prompt) for prompt in prompts]
    expected = [heard.wait() and heard.text for heard in expected]
    alone.close()
    return {"same": texts == expected, "each token once": list(counts.values()) == [passed] * 3}


def count_tokens():
    """Tokens that go through each stage from now on, counted where its layers are called."""
    counts, made = {}, StagePasses._made

    def counted(self, given, laid):
        counts[self] = counts.get(self, 0) + sum(last + 1 for last in laid.lasts)
        return made(self, given, laid)

    StagePasses._made = counted
    return counts


def _ask(engine, prompt):
    heard = Heard()
    engine.ask(Question(model="m", text=prompt, max_tokens=12, temperature=0), heard)
    return heard


def stages_with_errors(folder):
    """The end of answers whose pass fails in a later stage, and of those after them."""
    staged = open_engine("stages", with_stages(Served(name="m", folder=Path(make_deep(folder)), num_parallel=2), 2))
    begin, failures = staged._chain.begin, [True]

    def broken(slots, fresh):
        own = staged._chain._own
        if failures.pop() if failures else False:
            made = own.pass_tokens(list(slots), [list(each) for each in fresh])
            head = {"do": "pass", "slots": list(slots), "counts": [len(each) for each in fresh]}
            staged._chain._send(head, made[..., :-1])  # too narrow
        else:
            begin(slots, fresh)

    staged._chain.begin = broken
    last = [_ask(staged, "tea").wait() for _ in range(2)]
    staged.close()
    return [type(last[0].error).__name__, last[0].error.what, last[1].finish]


def stage_that_hangs(folder):
    """The error of an answer whose pass does not end in the last of three stages, and why the engine is broken."""
    stage_link.BEAT_S, stage_link.SILENT_S, stage_model.PASS_S = 0.1, 4.0, 1.0
    staged = open_engine("stages", with_stages(Served(name="m", folder=Path(make_deep(folder)), num_parallel=2), 2))
    release, made = threading.Event(), StagePasses._made

    def slow(self, given, laid):
        self._begun = time.monotonic()
        if self._stage_model.is_last:
            release.wait(60)
        return made(self, given, laid)

    StagePasses._made = slow
    error = _ask(staged, "tea").wait().error
    release.set()
    staged.close()
    return {"what": error.what, "broken": staged.broken.what}


def stage_missed_by_another(folder):
    """The error of an answer where the last stage says that the one before it says nothing."""
    staged = open_engine("stages", with_stages(Served(name="m", folder=Path(make_deep(folder)), num_parallel=2), 2))
    told, made = [True], _StageWorker._handle

    def missing(self, head, given):
        if head["do"] == "pass" and self._prepared.number == 2 and told:
            told.clear()
            self._tell_lost(1, LinkSilent("nothing is heard"))
        made(self, head, given)

    _StageWorker._handle = missing
    error = _ask(staged, "tea").wait().error
    staged.close()
    return f"{error.what}; {error.seen}"


def met(address):
    """What two ends of a connection say to each other while two strangers are there who say nothing."""
    with listen_for_stages(address, None) as listener, contextlib.ExitStack() as stack:
        place = listener.getsockname()
        for _ in range(2):
            stack.enter_context(socket.create_connection(place[:2]))
        called = []
        waiting = threading.Thread(
            target=lambda: called.append(await_call(listener, KEY, until=lambda: False)), daemon=True
        )
        waiting.start()
        caller = call_stage("h1", address, place[1], KEY)
        waiting.join(10)
        caller.send({"do": "open"})
        said = called[0].receive()[0]
        for link in (caller, *called):
            link.close()
    return said


def without_memory():
    """What whoever waits for a message hears where its tensor finds no room."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = StageLink(socket.create_connection(listener.getsockname()))
        far = StageLink(listener.accept()[0])
    near.send({"do": "pass"}, torch.ones(3))
    torch.empty, kept = (lambda *_, **__: torch.ones(2) @ torch.ones(3)), torch.empty  # any RuntimeError
    try:
        far.receive()
    except LinkLost as error:
        return str(error)
    finally:
        torch.empty = kept
        for link in (near, far):
            link.close()


def in_flight(folder):
    """The most passes that were on their way at once, with six answers over three stages."""
    staged = open_engine("stages", with_stages(Served(name="m", folder=Path(make_deep(folder)), num_parallel=6), 2))
    most, land = [0], staged._land

    def counting():
        most[0] = max(most[0], len(staged._flying))
        return land()

    staged._land = counting
    for heard in [_ask(staged, f"tea {number}") for number in range(6)]:
        heard.wait()
    staged.close()
    return most[0]


def divided(facts, **words):
    """Layers of each host, or the refusal."""
    sizes = {"layers": 10, "layer_bytes": 100 << 20, "first_bytes": 50 << 20, "last_bytes": 50 << 20, "limit": 2048}
    facts = [{"free_bytes": free * 2**20, "layer_s": seconds} for free, seconds in facts]
    names = [f"h{number}" for number in range(len(facts))]
    asked = {"num_rows": 2, "context": None, **words}
    try:
        return divide({**sizes, "token_bytes": 1024}, facts, names=names, **asked)
    except GanglineError as error:
        return f"{error.what}; {error.seen}"


def stage_bytes(folder):
    """Bytes of weights in each of three stages, and of the whole model."""
    staged = open_engine("stages", with_stages(Served(name="m", folder=Path(make_deep(folder)), num_parallel=2), 2))
    plan = staged.plan
    staged.close()
    model = open_folder(Path(folder) / "deep").model
    whole = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    table = model.get_input_embeddings().weight.nbytes
    assert isinstance(model.dtype, torch.dtype)
    return {"stages": [each["weight_bytes"] for each in plan["stages"]], "whole": whole, "table": table}

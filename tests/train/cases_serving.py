"""What happens in the processes of test_serving."""

import dataclasses
import threading
from pathlib import Path
from random import Random

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gangline.errors import GanglineError
from gangline.worker.generate import open_folder
from gangline.worker.serving.cache_plan import free_bytes, group_rooms, plan_cache
from gangline.worker.serving.engine import Question, QueueFull, Served, StageAddress, open_engine
from gangline.worker.serving.passes import layer_shapes, open_passes
from gangline.worker.serving.stage_link import listen_for_stages
from gangline.worker.serving.stage_worker import run_stage
from gangline.worker.talk import Sampling
from tests.train.cases_generate import TEMPLATE, exported, model_folder

KEY = "known-to-the-stages-only"
STAGES = []
"""Threads that are stages: a model that one of them loads must not meet another one that the test makes."""
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


def with_stages(served, number):
    """The same with stages behind the first one, each a thread of this process."""
    stages = []
    for name in range(number):
        listener = listen_for_stages("127.0.0.1", None)
        stages.append(StageAddress(host=f"h{name}", address="127.0.0.1", port=listener.getsockname()[1]))
        STAGES.append(threading.Thread(target=run_stage, args=(listener, KEY, served.folder), daemon=True))
        STAGES[-1].start()
    return dataclasses.replace(served, stages=tuple(stages), key=KEY)


def contract(folder, *, engine):
    """What every engine keeps of its promises, by promise."""
    served = Served(name="m", folder=model_folder(folder), num_parallel=1, num_waiting=1)
    opened = open_engine(engine, with_stages(served, 1) if engine == "stages" else served)
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


def model_of_kind(kind):
    """A tiny model of a kind, with random weights."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 300, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    shape = {"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {**sizes, **shape, "head_dim": 8, "max_position_embeddings": 128}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ropes |= {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    chunks = {
        "attention_chunk_size": 64,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1] * 4,
    }
    old = {"vocab_size": 300, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    states = {"vocab_size": 300, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "initializer_range": 0.2}
    classes, config = {
        "window": (MistralForCausalLM, lambda: MistralConfig(**more, sliding_window=8)),
        "some windows": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**more, sliding_window=8, **kinds)),
        "mixture": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**more, **experts)),
        "learned positions": (GPT2LMHeadModel, lambda: GPT2Config(**old, n_embd=32, n_positions=128)),
        "positions in the scores": (BloomForCausalLM, lambda: BloomConfig(**old, hidden_size=32)),
        "long rope": (LlamaForCausalLM, lambda: LlamaConfig(**more, rope_parameters={**rope, "rope_theta": 1e4})),
        "ropes": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**more, **kinds, rope_parameters=ropes)),
        "chunks": (Llama4ForCausalLM, lambda: Llama4TextConfig(**more, **chunks)),
        "states": (MambaForCausalLM, lambda: MambaConfig(**states)),
    }[kind]
    return classes(config())


def passes_of(kind):
    """Rows that join and leave at random moments: whether they share passes, why not, greedy tokens, tokens passed."""
    model = model_of_kind(kind).eval()
    shapes = layer_shapes(model)
    passes, alone_for = open_passes(model, num_rows=3, context=100, shapes=shapes)
    random, prompts = Random(5), {}
    for number in range(5):
        prompts[number] = [random.randrange(2, 300) for _ in range(random.choice([1, 3, 20, 41]))]
    waiting, rows, tokens, counted = list(prompts), {}, {each: list(prompts[each]) for each in prompts}, 0
    left = {}
    with torch.inference_mode():
        while waiting or rows:
            if waiting and len(rows) < 3 and random.random() < 0.4:
                name = waiting.pop(0)
                rows[name] = passes.open()
                left[name] = list(tokens[name])
            taking = [each for each in rows if random.random() < 0.8]
            if not taking:
                continue
            whole = passes.chunk_tokens is None
            fresh = [left[each][: None if whole else random.choice([1, 7])] for each in taking]
            counted += sum(map(len, fresh))
            logits = passes.step(model, [rows[each] for each in taking], fresh)
            for each, part, row in zip(taking, fresh, logits, strict=True):
                left[each] = left[each][len(part) :]
                if not left[each]:
                    tokens[each].append(int(row.argmax()))
                    left[each] = tokens[each][-1:]
                if len(tokens[each]) == len(prompts[each]) + 12:
                    passes.close(rows.pop(each))
    return {
        "together": passes.together,
        "alone for": alone_for,
        "same": all(_is_greedy(model, tokens[each], len(prompts[each])) for each in prompts),
        "each token once": counted == sum(len(each) + 11 for each in prompts.values()),
    }


def _is_greedy(model, tokens, num_prompt):
    """Whether each token after the prompt is the likeliest one, in one pass over all of them without a cache."""
    with torch.inference_mode():
        likeliest = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].argmax(dim=-1).tolist()
    return likeliest[num_prompt - 1 :] == tokens[num_prompt:]


def beside_a_long_prompt(folder):
    """Tokens that another answer gets while a prompt of 100 tokens is taken in, 8 at a time; and both texts alone."""
    opened = open_engine("transformers", Served(name="m", folder=model_folder(folder), num_parallel=2))
    opened._passes.chunk_tokens = 8
    order = []

    def ask(name, text, number, then=None):
        heard = Heard()

        def give(piece):
            order.append(name)
            if then is not None and len(order) == 3:
                then()
            heard(piece)

        opened.ask(Question(model="m", text=text, max_tokens=number, temperature=0), give)
        return heard

    others = []
    first = ask("short", "tea", 60, then=lambda: others.append(ask("long", "x" * 100, 2)))
    first.wait()
    others[0].wait()
    begun = order.index("long")
    between = order[begun : order.index("long", begun + 1)].count("short")
    alone = []
    for text, number in (("tea", 60), ("x" * 100, 2)):
        alone.append(ask("alone", text, number))
        alone[-1].wait()
    opened.close()
    return {"between": between, "same": [first.text, others[0].text] == [each.text for each in alone]}


def after_an_answer_without_numbers():
    """Whether the answer in the row of one whose keys and values were NaN has the logits of plain passes."""
    model = model_of_kind("learned positions").eval()
    passes, _ = open_passes(model, num_rows=3, context=100, shapes=layer_shapes(model))
    kept, before, broken = passes.open(), passes.open(), passes.open()
    bias = model.transformer.h[1].attn.c_attn.bias
    sound = bias.detach().clone()
    with torch.inference_mode():
        passes.step(model, [kept, before], [[5] * 40, [6] * 3])
        bias.fill_(float("nan"))
        ill = passes.step(model, [broken], [[7] * 30])
        bias.copy_(sound)
        passes.close(before)
        passes.close(broken)
        fresh = [passes.open(), passes.open()]
        seen = passes.step(model, [kept, *fresh], [[8], [9, 10], [11]])
        expected = model(input_ids=torch.tensor([[9, 10]])).logits[0, -1]
    return {"was NaN": bool(ill.isnan().all()), "same": torch.allclose(seen[1], expected, atol=1e-4)} | {
        "all are numbers": bool(seen.isfinite().all())
    }


def after_a_device_error(folder):
    """The errors of an answer whose logits cannot be read from the device, and the end of the next one."""
    opened = open_engine("transformers", Served(name="m", folder=model_folder(folder), num_parallel=2))
    step = opened._passes.step

    def broken(*arguments):
        opened._passes.step = step
        return step(*arguments).to("meta")

    opened._passes.step = broken
    last = []
    for _ in range(2):
        heard = Heard()
        opened.ask(Question(model="m", text="tea", max_tokens=2, temperature=0), heard)
        last.append(heard.wait())
    opened.close()
    return [type(last[0].error).__name__, last[1].finish]


def adapter_as_base(folder):
    """The refusal of an adapter by the name of the model below it."""
    exported(folder)
    try:
        open_engine("transformers", Served(name="base", folder=Path(folder) / "out"))
    except GanglineError as error:
        return error.what
    return "none"


def cache_plans(folder):
    """What is planned, and refused, for a cache beside the free memory of this computer."""
    speaker = open_folder(model_folder(folder))
    free = free_bytes(speaker.model.device)

    def plan(token_bytes, **changes):
        asked = {"limit": 4000, "context": None, "num_parallel": 2, **changes}
        try:
            return plan_cache(speaker.model, token_bytes=int(token_bytes), **asked).context
        except GanglineError as error:
            return f"{error.what}; {error.fix}"

    return {
        "fits": plan(100),
        "shortened": plan(free / 5000),
        "asked": plan(100, context=500),
        "too long": plan(100, context=5000),
        "asked and too large": plan(free / 5000, context=4000),
        "no room": plan(free),
        "unknown size": plan_cache(
            speaker.model, token_bytes=None, limit=None, context=None, num_parallel=2
        ).cache_bytes,
        "of the model": layer_shapes(speaker.model)[0].token_bytes,
    }


def rooms_of_groups(folder):
    """What control groups of both versions leave: a bound of 100 with 60 used, of which 10 are files, and below it 70."""
    root, own = Path(folder) / "groups", Path(folder) / "own"
    places = {"outer": (100, 60, 10), "outer/inner": (80, 20, 10)}
    for top, limit, used, row in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for name, values in places.items():
            (top / name).mkdir(parents=True)
            (top / name / limit).write_text(f"{values[0]}\n")
            (top / name / used).write_text(f"{values[1]}\n")
            (top / name / "memory.stat").write_text(f"anon 1\n{row} {values[2]}\n")
    found = []
    for text in ("0::/outer/inner\n", "4:memory:/outer/inner\n0::/\n", "3:cpu:/outer\n"):
        own.write_text(text)
        found.append(group_rooms(root, own))
    return found


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

"""A GGUF file beside the model that it was made from: both read the same texts, and what differs is said.

llama.cpp loads the file on the CPU and answers over loopback, for this process alone (it has the token).
"""

from __future__ import annotations

import json
import math
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gangline.errors import RunFailed
from gangline.worker.data.tokenise import template_of

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 1234567 sheep don't look up.",
    "Natalia sold 48 clips in April. How many did she sell?\n\n  Answer: 48/2 = 24, so it's 72.",
    "Grüße aus Zürich: naïve café, 你好世界, привет 🙂!\tdef f(x):\n    return x ** 2\n",
)
POSITIONS = 32
"""Of each text: every one costs llama.cpp a list of all words."""
TOLERANCE = {"f32": 1e-2, "f16": 1e-2, "bf16": 8e-2, "q8_0": 1e-1, "q4_k_m": math.inf}
"""Of a logit, over the largest one. bf16 has an eighth of the steps of f16; with f32 the cache has 16 bits, too. q8_0
lies between what was seen of good files and of wrong ones: benchmarks/RESULTS.md. What q4_k_m loses is said only: it is
made from a file in f32 that was checked, and each of its tensors was decoded and compared."""
ANSWER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionLoss:
    """How far a file is from its model."""

    positions: int
    max_logit_difference: float
    """Of a logit from the mean of all words, over the largest such logit."""
    largest_logit: float
    top_agreement: float
    """The share of positions at which both find the same word likeliest."""
    perplexity: float
    model_perplexity: float


def check_text(path: Path, folder: Path) -> LlamaServer:
    """Load a file with llama.cpp, and compare how text is cut, begun and ended, and the text of a chat.

    Raises RunFailed where it is not as by the model's tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = LlamaServer(path)
    _check_end(path, folder, tokenizer)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        if (seen := engine.ask("/tokenize", content=text, add_special=True)["tokens"]) != tokens:
            raise _wrong(path, f"{text[:24]!r} is {seen[:8]} ... there, and {tokens[:8]} ... in the model's tokenizer")
    _check_template(path, engine, tokenizer)
    return engine


def check_file(path: Path, folder: Path, form: str) -> ConversionLoss:
    """Compare a file with the model of `folder`, its logits too. Raises RunFailed where it is not the same model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine, tokenizer = check_text(path, folder), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # llama.cpp wants room for one more token than it is given
    positions = min(POSITIONS, getattr(model.config.get_text_config(), "max_position_embeddings", POSITIONS + 1) - 1)
    lost = _compare(engine, model, [tokenizer.encode(text)[: positions + 1] for text in TEXTS])
    # written so that NaN fails, too
    if not lost.max_logit_difference <= TOLERANCE[form]:
        raise _wrong(
            path,
            f"expected logits within {TOLERANCE[form]:.2g} of the model's (relative to the largest); seen "
            f"{lost.max_logit_difference:.2g}, and the same likeliest word at {lost.top_agreement:.0%} of "
            f"{lost.positions} positions",
        )
    return lost


class LlamaServer:
    """llama.cpp with one file. Raises RunFailed where it does not load."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        self._token = secrets.token_urlsafe(24)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.port, params.warmup = 2 * POSITIONS + 64, 1, 0, False
        params.cpuparams.n_threads = torch.get_num_threads()
        params.api_keys = [self._token]
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise _wrong(path, f"llama.cpp does not load it: {error}") from error
        self._address = str(self._server.listening_address)

    def ask(self, verb: str, **values: Any) -> dict[str, Any]:
        """One answer of its server."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = json.dumps(values).encode()
        request = urllib.request.Request(self._address + verb, data=data, headers=headers)  # noqa: S310 - loopback
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            raise RunFailed(
                f"llama.cpp does not answer {verb}",
                seen=error.read().decode(errors="replace")[:300]
                if isinstance(error, urllib.error.HTTPError)
                else str(error)[:300],
                fix="export without --check; if that helps, report it: gangline report-bug",
            ) from error
        return found

    def logarithms(self, tokens: list[int], words: int, plain: int) -> torch.Tensor:
        """The logarithm of the probability of each word after `tokens`. plain: any word that is whole text."""
        # the word that is drawn has to be text: of half a character nothing is said
        how = {"n_predict": 1, "n_probs": words, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        answer = self.ask("/completion", prompt=tokens, logit_bias=[[plain, 1000.0]], **how)
        found = torch.full((words,), -math.inf)
        for each in answer["completion_probabilities"][0]["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found


@torch.no_grad()
def _compare(engine: LlamaServer, model: Any, texts: list[list[int]]) -> ConversionLoss:
    differences, largest, same = [], [], []
    here, there = [], []
    words = model.config.get_text_config().vocab_size
    plain = texts[0][-1]
    for tokens in texts:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        for position in range(len(tokens) - 1):
            seen = engine.logarithms(tokens[: position + 1], words, plain)
            expected = logits[position].log_softmax(-1)
            one, other = expected - expected.mean(), seen - seen.mean()
            differences.append(float((one - other).abs().max()))
            largest.append(float(one.abs().max()))
            same.append(int(one.argmax()) == int(other.argmax()))
            here.append(-float(expected[tokens[position + 1]]))
            there.append(-float(seen[tokens[position + 1]]))
    return ConversionLoss(
        positions=len(same),
        max_logit_difference=_most(differences) / max(largest),
        largest_logit=max(largest),
        top_agreement=sum(same) / len(same),
        perplexity=math.exp(sum(there) / len(there)),
        model_perplexity=math.exp(sum(here) / len(here)),
    )


def _most(values: list[float]) -> float:
    """The largest value; NaN where one is none."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _check_end(path: Path, folder: Path, tokenizer: Any) -> None:
    """Answers end with the same token."""
    from gguf import GGUFReader  # type: ignore[import-not-found]

    field = GGUFReader(path).get_field("tokenizer.ggml.eos_token_id")
    seen = None if field is None else int(field.contents())
    if seen != tokenizer.eos_token_id:
        raise _wrong(path, f"answers end with token {seen} there, and with {tokenizer.eos_token_id} in {folder}")


def _check_template(path: Path, engine: LlamaServer, tokenizer: Any) -> None:
    """A chat is the same text."""
    if template_of(tokenizer) is None:
        return
    chat = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "And now?"},
    ]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    seen = engine.ask("/apply-template", messages=chat)["prompt"]
    begin = tokenizer.bos_token or ""
    if seen.removeprefix(begin) != expected.removeprefix(begin):
        raise _wrong(path, f"a chat is {seen[:80]!r} there, and {expected[:80]!r} by the model's template")


def _wrong(path: Path, seen: str) -> RunFailed:
    return RunFailed(
        f"{path.name} is not the model that it was made from; it was removed",
        seen=seen,
        fix="export again; if it comes back, use the folder with transformers, and report it: gangline report-bug",
    )

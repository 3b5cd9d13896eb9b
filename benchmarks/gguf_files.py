"""GGUF files of small models beside the models: how far are they, and does the check find what is wrong with a file?

    python -m benchmarks.gguf_files --out gguf_files.jsonl       # downloads llama.cpp's converter and engine once

Models of random weights, two layers, fp32, made here: Llama, Mistral, Qwen2, Qwen3 and Gemma. The tokenizer is a BPE
trained here, with the pattern of GPT-2, Llama 3 or Qwen2, or one of SentencePiece. Each is converted by llama.cpp's
converter to each form, and compared by the check of `gangline export --check`;
then 64 words are drawn greedily by both, equal up to the first place where the gap of the model's two likeliest words
is below twice the largest difference of a logit. Then ten faults are planted, one at a time, into the folder that is
converted or the file that was, and the check is asked. Three wider models are
written as q4_k_m, beside PyTorch with the same weights rounded. One JSON line each. Exit code 1 if a file was refused
that has no fault, if words differ before such a place, if a fault was not found, or if a report is not PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from gangline.errors import GanglineError
from gangline.provision.code import trainer_here
from gangline.provision.llama_cpp import bring_llama_cpp
from gangline.worker.gguf import MIXED, PATTERNS, convert
from gangline.worker.gguf_check import POSITIONS, TEXTS, TOLERANCE, LlamaServer, check_file
from gangline.worker.gguf_mix import quantise_file, quantised, type_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["the quick brown fox jumps over the lazy dog, 48 clips and 24 more; how many did she sell in april? "] * 5
WORDS = 400
SHAPES = {
    "llama": ("llama", "sentencepiece"),
    "llama3": ("llama", "llama-bpe"),
    "mistral": ("mistral", "sentencepiece"),
    "llama-gpt2": ("llama", "gpt-2"),
    "qwen2": ("qwen2", "qwen2"),
    "qwen3": ("qwen3", "qwen2"),
    "gemma": ("gemma", "sentencepiece-no-prefix"),
}
"""Model -> architecture of transformers, tokenizer."""
LAYERS = 8
"""Of a model in q4_k_m: three of them keep more bits."""


def write_tokenizer(kind: str, folder: Path) -> int:
    """Write a tokenizer trained on a few words, cutting text as a known one does; its number of words."""
    if kind.startswith("sentencepiece"):
        return _write_sentencepiece(folder, prefix=kind == "sentencepiece")
    pattern, whole = next(key for key, name in PATTERNS.items() if name == kind)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == "ByteLevel")
    found = Tokenizer(models.BPE(ignore_merges=whole))
    found.pre_tokenizer = level if pattern == "ByteLevel" else pre_tokenizers.Sequence([split, level])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(TEXT, trainer)
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=found, **names, chat_template=TEMPLATE).save_pretrained(folder)
    return WORDS


def _write_sentencepiece(folder: Path, *, prefix: bool) -> int:
    import sentencepiece  # type: ignore[import-not-found]

    text = folder / "text"
    text.write_text("\n".join(TEXT), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, unk_id=0, bos_id=1, eos_id=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix,
    )  # fmt: skip
    text.unlink()
    whole = (folder / "tokenizer.model").read_bytes()
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True, add_prefix_space=prefix)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(whole)
    return len(tokenizer)


def make_model(name: str, folder: Path, *, seed: int, **changes: Any) -> None:
    """A folder with a model of random weights and its tokenizer; `changes` of its configuration."""
    torch.manual_seed(seed)
    kind, cut = SHAPES[name]
    folder.mkdir()
    words = write_tokenizer(cut, folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "vocab_size": words}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**sizes, **more, **ends, "initializer_range": 0.1, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})

    return plant


def _json(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document)
        path.write_text(json.dumps(document), encoding="utf-8")

    return plant


def _swap_rotary(tensors: dict[str, torch.Tensor]) -> None:
    """Halves into pairs: the other of the two orders."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name].view(rows // 16, 2, 8, columns).transpose(1, 2).reshape(rows, columns)


def _swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    one, other = (f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _shift_words(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)


def _scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1.25


def _template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|", "["), encoding="utf-8")


def _no_begin(folder: Path) -> None:
    _json("tokenizer.json", lambda document: document.update(post_processor=None))(folder)
    _json("tokenizer_config.json", lambda document: document.update(add_bos_token=False))(folder)


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])


def _zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) * 3 // 4
    data[middle : middle + 8192] = bytes(8192)
    path.write_bytes(data)


IN_FOLDER: dict[str, Callable[[Path], None]] = {
    "wrong template": _template,
    "no BOS": _no_begin,
    "another end of text": _json("tokenizer_config.json", lambda document: document.update(eos_token="<unk>")),
    "rotary order": _weights(_swap_rotary),
    "layers swapped": _weights(_swap_layers),
    "words shifted": _weights(_shift_words),
    "a matrix scaled": _weights(_scale),
    "rotary base": _json(
        "config.json",
        lambda document: document.update(
            rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
    ),
}
IN_FILE: dict[str, Callable[[Path], None]] = {"truncated": _truncate, "zeros within": _zero}


@torch.no_grad()
def greedy(path: Path, folder: Path, *, error: float) -> dict[str, Any]:
    """64 words of both, until a gap of the model's is below twice `error`, a difference of logits."""
    engine, model = LlamaServer(path), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder).encode("how many")
    plain = tokens[-1]
    for number in range(64):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        if first - second < 2 * error:
            return {"equal": number, "unclear": first - second, "differs": False}
        word = int(logits.argmax())
        if int(engine.logarithms(tokens, len(logits), plain).argmax()) != word:
            return {"equal": number, "unclear": None, "differs": True}
        tokens.append(word)
    return {"equal": 64, "unclear": None, "differs": False}


def one(name: str, form: str, folder: Path, path: Path, tools: Path) -> dict[str, Any]:
    """A line of a file without fault."""
    began = time.monotonic()
    line: dict[str, Any] = {"model": name, "form": form, "fault": None}
    try:
        convert(folder, path, form, llama_cpp=tools)
        line["bytes"] = path.stat().st_size
        lost = check_file(path, folder, form)
    except GanglineError as refused:
        return {**line, "good": False, "seen": refused.seen}
    words = greedy(path, folder, error=lost.max_logit_difference * lost.largest_logit)
    return {
        **line, "good": not words["differs"], **asdict(lost), "greedy": words, "seconds": time.monotonic() - began
    }  # fmt: skip


def mixed(name: str, folder: Path, path: Path, tools: Path, *, seed: int) -> dict[str, Any]:
    """A line of a file in q4_k_m, with eight layers whose rows have whole blocks: what the check says of it, and what
    plain transformers says with each weight quantised and decoded by itself. llama.cpp also rounds activations.
    """
    ties = {"tie_word_embeddings": name == "qwen2"}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "head_dim": 64}
    make_model(name, folder, seed=seed, **sizes, **ties, initializer_range=0.04)
    whole = path.with_suffix(".whole")
    convert(folder, whole, "f32", llama_cpp=tools)
    quantise_file(whole, path)
    lost = check_file(path, folder, MIXED)
    perplexity, agreement = by_hand(folder)
    near = abs(lost.perplexity / perplexity - 1) < 0.01 and abs(lost.top_agreement - agreement) < 0.05
    line = {"model": name, "form": MIXED, "by_hand_perplexity": perplexity, "by_hand_agreement": agreement}
    return {**line, **asdict(lost), "bytes": path.stat().st_size, "f32_bytes": whole.stat().st_size, "good": near}


@torch.no_grad()
def by_hand(folder: Path) -> tuple[float, float]:
    """Perplexity and agreement of the likeliest word of a model in q4_k_m, in PyTorch."""
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, rounded = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    tied = bool(model.config.tie_word_embeddings)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, model.config.model_type.upper()), LAYERS)
    for name, weight in rounded.named_parameters():
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = type_of(there, tuple(weight.shape), num_layers=LAYERS, tied=tied, grouped=True)
        if kind is not None:
            number = gguf.GGMLQuantizationType[kind]
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(quantised(weight.numpy(), kind), number)))
    surprise, same = [], []
    for text in TEXTS:
        tokens = torch.tensor([tokenizer.encode(text)[: POSITIONS + 1]])
        one, other = (each(input_ids=tokens).logits[0, :-1].log_softmax(-1) for each in (model, rounded))
        surprise += (-other.gather(1, tokens[0, 1:, None]))[:, 0].tolist()
        same += (one.argmax(-1) == other.argmax(-1)).tolist()
    return math.exp(sum(surprise) / len(surprise)), sum(same) / len(same)


def planted(name: str, form: str, fault: str, folder: Path, tools: Path) -> dict[str, Any]:
    """A line of a file with a fault."""
    wrong, path = folder.with_name("wrong"), folder.with_name("wrong.gguf")
    shutil.rmtree(wrong, ignore_errors=True)
    path.unlink(missing_ok=True)
    shutil.copytree(folder, wrong)
    IN_FOLDER.get(fault, lambda _folder: None)(wrong)
    line = {"model": name, "form": form, "fault": fault}
    try:
        convert(wrong, path, form, llama_cpp=tools)
        IN_FILE.get(fault, lambda _path: None)(path)
        check_file(path, folder, form)
    except GanglineError as found:
        return {**line, "good": True, "seen": found.seen}
    return {**line, "good": False, "seen": ""}


def main() -> int:
    """Play all; one line each."""
    parser = argparse.ArgumentParser(prog="benchmarks.gguf_files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()) / "gguf_files", help="for llama.cpp")
    parser.add_argument("--seed", type=int, default=3, help="of the models' weights")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tools = bring_llama_cpp(trainer_here(options.home), options.home)
    path = f"{tools}{os.pathsep}{tools / 'gguf-py'}"
    if os.environ.get("PYTHONPATH") != path:  # transformers asks at its import whether sentencepiece is there
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "PYTHONPATH": path})
    good = True
    with tempfile.TemporaryDirectory() as there, options.out.open("a", encoding="utf-8") as out:
        for name in SHAPES:
            folder = Path(there) / name
            make_model(name, folder, seed=options.seed)
            for form in [each for each in TOLERANCE if each != MIXED]:
                lines = [one(name, form, folder, Path(there) / f"{name}-{form}.gguf", tools)]
                if lines[0]["good"] and form in {"f16", "q8_0"} and name in {"llama", "qwen2"}:
                    lines += [planted(name, form, fault, folder, tools) for fault in (*IN_FOLDER, *IN_FILE)]
                for line in lines:
                    good = good and line["good"]
                    out.write(json.dumps({"seed": options.seed, **line}) + "\n")
                    out.flush()
        for name in ("llama3", "qwen2", "qwen3"):
            line = mixed(name, Path(there) / f"{name}-wide", Path(there) / f"{name}.gguf", tools, seed=options.seed)
            good = good and line["good"]
            out.write(json.dumps({"seed": options.seed, **line}) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

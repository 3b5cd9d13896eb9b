"""Small models, tokenizers and finished runs for the tests, made on the spot."""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gangline.runs.checkpoints import part_folder
from gangline.runs.job import CheckpointJob, DataJob, Job, MethodJob, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.worker.checkpoint import LocalShard, Saver
from gangline.worker.model import load_model, saved_weights
from tests.saved import place_commit

VOCABULARY = 300


def write_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    """A tokenizer of single bytes, so that any text can be said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: number for number, letter in enumerate(alphabet, 2)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def write_model(folder: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, **more) -> None:
    """A model folder with random weights, large enough to make logits differ."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "llama":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **more}
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, **shape, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2)
        )
    elif kind == "mixture":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, **shape, **experts, num_key_value_heads=2, max_position_embeddings=128, **more)
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, **more)
        )
    model.to(dtype).save_pretrained(folder)


def make_job(model: Path, *, method: str = "lora", **changes) -> Job:
    """A job over that folder. method: qlora-8 is qlora with 8 bits. `targets` goes to the method."""
    kind, _, bits = method.partition("-")
    targets = tuple(changes.pop("targets", ("all-linear",)))
    job = Job(
        name="tiny",
        model=ModelJob(path=str(model)),
        data=DataJob(train=SourceJob(files=("none.txt",))),
        batch=4,
        micro_batch=2,
        method=MethodJob(kind=kind, bits=int(bits or 4), rank=4, alpha=8.0, dropout=0.1, targets=targets),
    )
    return dataclasses.replace(job, **changes)


def write_run(
    root: Path, job: Job, *, step: int = 3, in_parts: bool = False
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A run with one committed checkpoint of random trained weights: (run directory, part, trained tensors).

    in_parts: as two hosts leave it, of which each has some rows of every tensor.
    """
    layout = RunLayout(root, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    job.save(layout.job)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in saved_weights(load_model(job)).items()
    }
    saved = {f"model.{name}": value for name, value in tensors.items()}
    saved["optimizer.first.exp_avg"] = torch.ones(3)
    if in_parts:
        return layout.folder, _write_parts(layout.checkpoints, saved, step=step), tensors
    description = {"attempt": 1, "hosts": ["here"], "num_ranks": 1, "fingerprints": {}}
    saver = Saver(layout.checkpoints, host="here", job=CheckpointJob(), description=description)
    saver.save(step, saved, {"step": step, "evaluation_loss": None}, wait=True)
    if saver.failure:
        raise saver.failure
    part = part_folder(layout.checkpoints, step, "here")
    place_commit(layout.checkpoints, commit_record({"here": (part / PART_FILE).read_bytes()}))
    return layout.folder, part, tensors


def _write_parts(checkpoints: Path, tensors: dict[str, torch.Tensor], *, step: int) -> Path:
    held = {"one": "the first rows", "two": "the other rows"}
    description = {"attempt": 1, "hosts": list(held), "num_ranks": 2, "fingerprints": {}, "held": held}
    texts = {}
    for number, host in enumerate(held):
        saver = Saver(checkpoints, host=host, job=CheckpointJob(), description=description)
        saver.save_shards(step, rows_of(tensors, number), {"step": step, "evaluation_loss": None}, wait=True)
        if saver.failure:
            raise saver.failure
        texts[host] = (part_folder(checkpoints, step, host) / PART_FILE).read_bytes()
    place_commit(checkpoints, commit_record(texts))
    return part_folder(checkpoints, step, "two")


def rows_of(tensors: dict[str, torch.Tensor], number: int) -> list[LocalShard]:
    """What the first or the second of two hosts holds of some tensors: two thirds of the rows, or the last ones."""
    pieces = []
    for name, tensor in tensors.items():
        cut = -(-2 * len(tensor) // 3)
        rows = tensor[cut:] if number else tensor[:cut]
        offsets = (cut * number, *(0,) * (tensor.ndim - 1))
        if len(rows):
            pieces.append(LocalShard(name=name, tensor=rows, offsets=offsets, shape=tuple(tensor.shape)))
    return pieces

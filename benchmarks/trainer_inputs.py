"""What all sides of the trainer benchmark read: a model folder with random weights, and a token set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks.trainer_cases import SEED, Case, Shape
from gangline.worker.batch import SampleOrder, TokenSource
from gangline.worker.data.tokens import SetWriter, TokenSet


def model_folder(folder: Path, case: Case) -> Path:
    """Where a case's model lies: weights of one dtype, shared by all cases that load that dtype."""
    return folder / f"{case.shape.name}-{'bf16' if case.precision == 'bf16' else 'fp32'}"


def rows_folder(folder: Path, case: Case) -> Path:
    """Where a case's token set lies."""
    return folder / f"rows-{case.name}-{case.steps}"


def prepare(folder: Path, case: Case) -> None:
    """Write what is missing of a case's model and rows."""
    if not (model_folder(folder, case) / "model.done").exists():
        _write_model(model_folder(folder, case), case)
    if not rows_folder(folder, case).exists():
        _write_rows(rows_folder(folder, case), case)


def open_rows(folder: Path, case: Case) -> TokenSet:
    """The case's rows."""
    return TokenSet.open(rows_folder(folder, case))


class InOrder(torch.utils.data.Dataset):
    """A token set for HF's loaders: its rows in the order in which our loop takes them, labels not yet shifted."""

    def __init__(self, source: TokenSource, case: Case) -> None:
        self._source = source
        self._packed = case.packed
        order = SampleOrder(num_samples=len(source), batch=case.batch, micro_batch=case.micro_batch, seed=SEED)
        self._indices = np.concatenate([order.samples(step) for step in range(case.steps)])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """One row; positions only where documents are packed: HF finds their borders in them."""
        sample = self._source.sample(int(self._indices[index]))
        labels = [-100, *sample.targets[:-1].tolist()]
        row = {"input_ids": sample.input_ids.tolist(), "labels": labels}
        return row | {"position_ids": sample.position_ids.tolist()} if self._packed else row


def document_lengths(source: TokenSource, samples: np.ndarray) -> np.ndarray:
    """Tokens of every document in these samples: what attention has to look at."""
    found = [np.zeros(0, dtype=np.int64)]
    for sample in (source.sample(int(index)) for index in samples):
        borders = np.flatnonzero(np.asarray(sample.position_ids) == 0)
        found.append(np.diff(np.append(borders, len(sample.position_ids))))
    return np.concatenate(found)


def stack(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Packed rows, all full, as one batch. No attention mask: with one, transformers ignores the borders."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def _write_model(folder: Path, case: Case) -> None:
    from transformers import LlamaForCausalLM

    config = _config(case)
    if case.drawn:
        config.save_pretrained(folder)
    else:
        torch.manual_seed(SEED)
        with torch.device(case.device):
            model = LlamaForCausalLM(config)
        model.to(torch.bfloat16 if case.precision == "bf16" else torch.float32).save_pretrained(folder)
    _write_tokenizer(folder, case.shape)
    (folder / "model.done").touch()


def _config(case: Case) -> Any:
    from transformers import AutoConfig

    shape = case.shape
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.active_experts}
        experts |= {"moe_intermediate_size": shape.intermediate, "router_aux_loss_coef": 0.0}  # else TRL adds it
    return AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=max(8192, case.sequence_length),
        pad_token_id=0,
        **experts,
    )


@contextmanager
def drawing(case: Case, dtype: torch.dtype) -> Iterator[None]:
    """Whoever asks transformers for a fresh model gets one whose weights are drawn on the case's device.

    They are the same for every side, whatever it has drawn before, and of `dtype`, whatever it asks for.
    """
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_config

    def draw(config: Any, **options: Any) -> Any:
        with torch.device(case.device):
            model = original(config, **(options | {"dtype": dtype}))
        fill(model)
        return model

    with mock.patch.object(AutoModelForCausalLM, "from_config", draw):
        yield


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Draw all matrices of a model anew, in the order of their names, with a generator of their own."""
    parameters = dict(model.named_parameters())
    draws = torch.Generator(device=next(iter(parameters.values())).device).manual_seed(SEED)
    for name in sorted(parameters):
        if parameters[name].ndim > 1:
            parameters[name].normal_(0.0, 0.02, generator=draws)


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """Never used to read text: HF's padding collator and TRL ask it for its padding token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(min(shape.vocabulary, 512))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", unk_token="w1", model_max_length=1 << 20
    ).save_pretrained(folder)


def _write_rows(folder: Path, case: Case) -> None:
    """A counting language with a stride per document; one step's rows more than the run reads."""
    draw = np.random.default_rng(SEED)
    num_rows = case.batch * (case.steps + 1)
    vocabulary, length = case.shape.vocabulary, case.sequence_length
    with SetWriter(folder, vocab_size=vocabulary, sequence_length=length, masked=not case.packed) as writer:
        for _ in range(num_rows):
            if case.one_document:
                sizes = [length]
            else:
                sizes = list(_halves(length, draw)) if case.packed else [int(draw.integers(length // 8, length + 1))]
            for size in sizes:
                tokens = int(draw.integers(vocabulary)) + np.arange(size) * int(draw.integers(1, 16))
                prompt = 0 if case.packed else int(size * draw.uniform(0.1, 0.7))
                writer.add((1 + tokens % (vocabulary - 1)).tolist(), bytearray(prompt) + b"\1" * (size - prompt))
        writer.publish({}, packing=case.packed)


def _halves(length: int, draw: np.random.Generator, *, depth: int = 0) -> Iterator[int]:
    """Document lengths that fill a row: halves, quarters and eighths, which best fit decreasing packs without a gap."""
    if depth and (depth == 3 or draw.random() < 0.5):
        yield length
        return
    for _ in range(2):
        yield from _halves(length // 2, draw, depth=depth + 1)

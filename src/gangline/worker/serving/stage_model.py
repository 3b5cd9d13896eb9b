"""One stage of a served pipeline: some layers of a model, with the keys and values of those layers alone.

It is cut as the pipeline that trains is (`strategies/pipeline`), and no process holds the whole model: weights are on
the meta device until each stage reads its own from the safetensors files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from gangline.errors import ModelError, UsageError
from gangline.runs.job import ModelJob
from gangline.strategies.pipeline.train import PipelineStage, split_stages
from gangline.worker.generate import SMALLER, in_memory, loading
from gangline.worker.model import layers_of, load_config, model_of
from gangline.worker.serving.passes import (
    HALF_TOLERANCE,
    MORE_KEPT,
    TOLERANCE,
    BatchedPasses,
    LayerShapes,
    PassLayout,
    keeps_logits,
    layer_shapes,
    tried_prompts,
    why_alone,
)
from gangline.worker.weights import Files, materialize, read_parts

_ALONE = threading.Lock()
"""While a model is empty, torch puts the parameters that any thread of the process sets on the meta device."""
ON_ONE_HOST = "serve it on one host: gangline serve RUN --on HOST"
TRIES = 3
"""How often a layer's products are timed; the fastest counts."""
PASS_S = 600.0
"""A pass that takes longer hangs: it is of the next tokens of all answers, or of 256 tokens of prompts."""


class StageModel:
    """Layers that are called as a whole model is: with tokens in the first stage, with hidden states in later ones."""

    def __init__(self, core: Any, stage: PipelineStage, device: torch.device) -> None:
        self._core, self._stage, self.device = core, stage, device
        self.config, self.generation_config = core.config, core.generation_config
        self._keeps_logits = keeps_logits(core)
        begin = sum(stage.stages[: stage.number])
        self.own = range(begin, begin + stage.stages[stage.number])

    @property
    def is_last(self) -> bool:
        """Whether it gives logits; others give hidden states."""
        return self._stage.is_last

    def get_base_model(self) -> Any:
        """The transformers model of which it has a part."""
        return self._core

    def get_input_embeddings(self) -> Any:
        """The table, of which later stages know the size alone."""
        table = self._core.get_input_embeddings()
        rows = self.config.get_text_config().vocab_size
        return table if hasattr(table, "weight") else SimpleNamespace(weight=torch.empty(rows, 0))

    def parameters(self) -> Iterator[torch.Tensor]:
        """Its weights."""
        yield from self._core.parameters()

    def buffers(self) -> Iterator[torch.Tensor]:
        """What lies beside its weights."""
        yield from self._core.buffers()

    def __call__(self, *, input_ids: torch.Tensor, logits_to_keep: torch.Tensor | None = None, **words: Any) -> Any:
        """`logits` (rows, tokens, vocabulary), or the hidden states (rows, tokens, width) in their place.

        input_ids: tokens, or hidden states. A stage that is tried gets tokens, too, and draws hidden states for them.
        logits_to_keep: the columns that are wanted; None: all.
        """
        if self._stage.is_first:
            words["input_ids"] = input_ids
        else:
            given = input_ids if input_ids.is_floating_point() else self._stage.drawn(input_ids, self.device)
            words["inputs_embeds"] = given
        if self.is_last:
            keep = {"logits_to_keep": logits_to_keep} if self._keeps_logits and logits_to_keep is not None else {}
            made = self._core(**keep, **words).logits
            logits_to_keep = None if keep else logits_to_keep
        else:
            self._core.base_model(**words)
            assert self._stage.after is not None
            made = self._stage.after.take()
        if logits_to_keep is not None:
            made = made[:, logits_to_keep]
        if not self._stage.is_first:
            self._stage.require_plain(given)
        return SimpleNamespace(logits=made)


def own_device() -> torch.device:
    """Where a stage computes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_stage(core: Any, folder: Path, *, number: int, stages: tuple[int, ...]) -> StageModel:
    """Read the layers of one stage from a model folder, into its empty model. stages: layers of each.

    Raises ModelError, UsageError.
    """
    source, device = ModelJob(path=str(folder)), own_device()
    if (folder / "generation_config.json").is_file():
        core.generation_config = GenerationConfig.from_pretrained(folder)
    stream = next(core.parameters()).dtype
    stage = split_stages(core, number=number, stages=stages, stream=stream)
    if (files := Files.of(source, core)) is None:
        raise ModelError(
            f"{folder} cannot be read in parts",
            seen="its files have other names than transformers gives the weights, or it keeps some of them in fp32",
            fix=ON_ONE_HOST,
        )
    no_room = f"the layers of {folder} do not fit into the memory here"
    with _ALONE, loading(str(folder), None), in_memory(no_room, SMALLER):
        materialize(core, device)
        read_parts(core, files, targets={})
    core.eval().requires_grad_(False)
    core.config.use_cache = True
    return StageModel(core, stage, device)


def empty_model(folder: Path) -> Any:
    """The model of a folder without numbers. Raises ModelError."""
    from accelerate import init_empty_weights

    source = ModelJob(path=str(folder))
    config = load_config(source)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with _ALONE:
        with init_empty_weights(include_buffers=False):
            core = model_of(config, source, dtype=dtype)
        core.tie_weights()  # which was lost on the way to the meta device
    return core


def model_sizes(core: Any) -> dict[str, Any]:
    """Of an empty model: layers, bytes of each, and of what is before and behind them.

    token_bytes: of keys and values of one token in one layer, as config.json says; 0 for a model that has none.
    """
    layers, config = layers_of(core), core.config.get_text_config()
    table, head = core.get_input_embeddings(), core.get_output_embeddings()
    queries = getattr(config, "num_attention_heads", 0)
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, queries)
    return {
        "layers": len(layers),
        "layer_bytes": max(_num_bytes(layer) for layer in layers),
        "first_bytes": _num_bytes(table),
        "last_bytes": _num_bytes(head) if head is not None else 0,
        "token_bytes": 2 * heads * size * next(core.parameters()).dtype.itemsize,
        "limit": getattr(config, "max_position_embeddings", None),
    }


def _num_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


@torch.inference_mode()
def layer_seconds(core: Any, *, num_rows: int) -> float:
    """How long the products of one layer take here for a token of each answer: random weights of its shapes.

    core: the empty model.
    """
    layer = layers_of(core)[0]
    device, total = own_device(), 0.0
    for weight in layer.parameters():
        if weight.ndim != 2:
            continue
        drawn = torch.randn(weight.shape, device=device).to(weight.dtype)
        rows = torch.randn(num_rows, weight.shape[1], device=device).to(weight.dtype)
        times = []
        for _ in range(TRIES):
            started = time.perf_counter()
            float((rows @ drawn.T).sum())  # waits for a GPU, too
            times.append(time.perf_counter() - started)
        total += min(times)
    return max(total, 1e-9)


class StagePasses(BatchedPasses):
    """Passes of one stage: what a stage gives is handed to the next one."""

    def __init__(self, stage: StageModel, *, num_rows: int, context: int, shapes: LayerShapes) -> None:
        super().__init__(stage, num_rows=num_rows, context=context, shapes=shapes)
        self._stage_model = stage
        self._begun: float | None = None

    def is_well(self) -> bool:
        """Whether no pass takes longer than `PASS_S`. May be asked by any thread."""
        begun = self._begun
        return begun is None or time.monotonic() - begun < PASS_S

    def pass_tokens(self, slots: list[int], fresh: list[list[int]]) -> torch.Tensor:
        """The first stage: hidden states of the next tokens of each slot, (rows, tokens, width)."""
        laid = self.lay_out(slots, [len(each) for each in fresh])
        return self._made(laid.fill(fresh, device=self._stage_model.device), laid)

    def pass_on(self, slots: list[int], counts: list[int], given: torch.Tensor) -> torch.Tensor:
        """A later stage: hidden states from those of the stage before; of the last one logits, (slots, vocabulary).

        counts: the tokens of each slot.
        """
        laid = self.lay_out(slots, counts)
        made = self._made(given.to(self._stage_model.device), laid)
        return laid.last_logits(made, is_kept=True) if self._stage_model.is_last else made

    def _made(self, given: torch.Tensor, laid: PassLayout) -> torch.Tensor:
        self._begun = time.monotonic()
        try:
            with torch.inference_mode():
                kept = torch.tensor(laid.kept, device=given.device) if self._stage_model.is_last else None
                made: torch.Tensor = self._stage_model(input_ids=given, logits_to_keep=kept, **laid.words).logits
            return made
        finally:
            self._begun = None


def stage_shapes(stage: StageModel) -> LayerShapes:
    """What its layers keep of a token. Raises UsageError for a model that cannot be served in stages."""
    if alone := why_alone(stage):
        raise _unfit(alone)
    if (shapes := layer_shapes(stage, own=stage.own)) is None:
        raise _unfit(MORE_KEPT)
    return shapes


@torch.inference_mode()
def try_batch(stage: StageModel, shapes: LayerShapes) -> None:
    """Compare a batch, in parts, with passes of whole prompts. Raises UsageError where they differ."""
    prompts = tried_prompts(stage)
    passes = BatchedPasses(stage, num_rows=len(prompts), context=max(map(len, prompts)), shapes=shapes)
    slots = [passes.open() for _ in prompts]
    whole = [stage(input_ids=torch.tensor([each], device=stage.device), use_cache=False).logits[0] for each in prompts]
    limit = TOLERANCE.get(next(iter(shapes.values())).dtype, HALF_TOLERANCE)
    done = 0
    for end in (3, min(map(len, prompts)) - 1, None):
        fresh = [prompt[done:end] for prompt in prompts]
        made = passes.step(stage, slots, fresh)
        expected = torch.stack([each[len(prompt[:end]) - 1] for each, prompt in zip(whole, prompts, strict=True)])
        off = float((made - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
        if not off <= limit:  # NaN is a difference, too
            raise _unfit(f"a batch was tried, and its numbers are off by {off:.1e} of the largest one")
        done = end or 0


def _unfit(seen: str) -> UsageError:
    return UsageError("this model cannot be served over several hosts", seen=seen, fix=ON_ONE_HOST)

"""`python -m gangline.worker export RUN --checkpoint PART --to DIR [--merged]`: a trained model for others to use.

LoRA and QLoRA give an adapter in peft's format, or with --merged a whole model in the precision of the base model,
whose weights are its own and never quantised ones; full fine-tuning gives a whole model. Nothing is called done before
the folder was loaded again by plain transformers and peft, every tensor was what it should be, and the logits were
those of the trained model. A checkpoint in parts is written, and read again, tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline import __version__
from gangline.errors import ModelError, RunFailed, UsageError
from gangline.formats import has_conversations
from gangline.runs.files import sync_folder, write_json
from gangline.runs.job import Job
from gangline.runs.layout import ADAPTER_CONFIG, EXPORT_NOTE
from gangline.worker.adapters import adapted_layers
from gangline.worker.data.model_folder import weights_folder
from gangline.worker.data.tokenise import stop_ids, with_template
from gangline.worker.json_lines import write_line
from gangline.worker.model import base_of, load_config, model_of
from gangline.worker.restore import some
from gangline.worker.tokenizer import load_tokenizer
from gangline.worker.trained import (
    Checkpoint,
    check_weight,
    check_weights,
    digest_of_tensor,
    hush_libraries,
    load_trained,
    merge_adapter,
    merged_weight,
    open_checkpoint,
    open_saved,
    read_trained,
    refuse_shared,
)
from gangline.worker.vocabulary import extend_config, extends, vocabulary_of
from gangline.worker.weights import Files, meta_model, read_whole

FILE_BYTES = 2 << 30
"""The limit of one file, unless a single tensor is larger."""
_EXACT = 1e-4
_SEQUENCES, _LENGTH = 2, 32

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The files that were written, and how far they are from the model in memory."""

    folder: str
    files: tuple[str, ...]
    max_logit_difference: float | None
    """Largest difference of a logit, over the largest logit; None: the model was never loaded, every tensor was
    compared."""
    tolerance: float
    """The limit of the difference: 1e-4, or `_rounding` where weights were rounded to another dtype."""
    dtype: str


def export_main(argv: list[str]) -> int:
    """Read the command line, export, and report in JSON lines on stdout."""
    parser = argparse.ArgumentParser(prog="gangline.worker export")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a part of a committed checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--merged", action="store_true", help="merge the adapter into the model and write the whole model"
    )
    options = parser.parse_args(argv)
    hush_libraries()

    def say(text: str) -> None:
        write_line("progress", text=text)

    done = export(options.run, options.checkpoint, options.to, merged=options.merged, say=say)
    write_line("result", **asdict(done))
    return 0


def export(run: Path, part: Path, to: Path, *, merged: bool = False, say: Say = lambda _text: None) -> Export:
    """Write the model of a checkpoint to the new folder `to`, load it again and compare.

    say: gets a line for each step. Raises UsageError, ModelError, CheckpointError; RunFailed when the files do not hold
    the trained model, and then `to` does not exist.
    """
    refuse_existing(to)
    checkpoint = open_checkpoint(run, part)
    _refuse_useless(checkpoint, merged=merged)
    method = checkpoint.job.method
    if method.kind == "qlora":
        say(f"over the base model's own weights: in training they were rounded to {method.bits} bits")
    if checkpoint.in_parts:
        say("writing tensor by tensor, and reading again what was written")
        if _export_by_tensor(checkpoint, to, merged=merged):
            return _exported(checkpoint, to, difference=None, tolerance=0.0)
        say("the base model cannot be read tensor by tensor: it is loaded whole")
    say("loading the trained model")
    model = load_trained(checkpoint)
    check_weights(model)
    logits = probe(model)
    whole = merged or method.kind == "full"
    tolerance = max(_EXACT, _rounding(model, checkpoint.stored)) if whole else _EXACT
    with _staged(to) as folder:
        say("writing")
        digests = (write_model if whole else write_adapter)(model, checkpoint, folder)
        write_json(folder / EXPORT_NOTE, _note(checkpoint, merged=merged))
        model.to("meta")
        say("loading what was written, and comparing")
        difference = verify(folder, checkpoint, digests, logits, tolerance=tolerance)
    return _exported(checkpoint, to, difference=difference, tolerance=tolerance)


def _rounding(model: Any, stored: torch.dtype) -> float:
    """How far logits may be from those of a model whose weights are not rounded to `stored`, over the largest logit.

    Eight rounding steps for two layers, and with the square root of more: each layer rounds by itself. Merged models
    of two random layers in bf16 were 4.0 steps away with the kernels of a processor without AVX, fewer with others.
    What is written is compared bit by bit besides.
    """
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 2)
    return 8.0 * float(torch.finfo(stored).eps) * math.sqrt(max(layers, 2) / 2)


def _exported(checkpoint: Checkpoint, to: Path, *, difference: float | None, tolerance: float) -> Export:
    return Export(
        folder=str(to),
        files=tuple(sorted(path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file())),
        max_logit_difference=difference,
        tolerance=tolerance,
        dtype=str(checkpoint.stored).removeprefix("torch."),
    )


def write_adapter(model: Any, checkpoint: Checkpoint, folder: Path) -> dict[str, str]:
    """Write the adapter in peft's format; the digest of every tensor by name."""
    from peft import get_peft_model_state_dict

    config, base = model.peft_config["default"], checkpoint.job.model
    config.base_model_name_or_path, config.revision = base.path, base.revision
    digests = _digests(get_peft_model_state_dict(model, save_embedding_layers=False))
    # the embeddings are not trained; "auto" would ask the hub whether they were
    model.save_pretrained(folder, save_embedding_layers=False)
    # peft's model card is a form with nothing filled in
    (folder / "README.md").unlink(missing_ok=True)
    if extends(checkpoint.job) or checkpoint.job.data.chat_template is not None:
        _tokenizer(checkpoint).save_pretrained(folder)
    return digests


def write_model(model: Any, checkpoint: Checkpoint, folder: Path) -> dict[str, str]:
    """Write a whole model in the dtype in which its base is stored, with the tokenizer; the digest of every tensor."""
    base = model.to(checkpoint.stored) if checkpoint.job.method.kind == "full" else merge_adapter(model)
    digests = _digests(base.state_dict())
    tokenizer = _tokenizer(checkpoint)
    _stop_where_turns_end(base, tokenizer, checkpoint)
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return digests


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """With the chat template that the model was trained with."""
    return with_template(load_tokenizer(checkpoint.job.model, checkpoint.job.tokens), checkpoint.job.data)


def _stop_where_turns_end(model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
    """Answers of a model that was tuned on conversations end where turns of its chat template do."""
    config = getattr(model, "generation_config", None)
    if config is None or not has_conversations(checkpoint.job.data.format):
        return
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [*known, tokenizer.eos_token_id, *stop_ids(tokenizer)]
    config.eos_token_id = [*dict.fromkeys(each for each in ends if each is not None)] or None


def verify(
    folder: Path, checkpoint: Checkpoint, digests: Mapping[str, str], expected: torch.Tensor, *, tolerance: float
) -> float:
    """Load `folder` as a stranger would, and compare; the difference of the logits. Raises RunFailed."""
    model, tensors = _reload(folder, checkpoint)
    _require_same(digests, _digests(tensors))
    difference = float((probe(model) - expected).abs().max() / expected.abs().max())
    # written so that NaN fails, too
    if not difference <= tolerance:
        raise _wrong(
            f"expected logits within {tolerance:.1e} of the trained model's (relative to the largest, "
            f"{checkpoint.stored}); seen {difference:.1e}"
        )
    return difference


@torch.no_grad()
def probe(model: Any) -> torch.Tensor:
    """Logits [sequence, position, word] in fp32 on fixed tokens, the same in every process."""
    config = model.config.get_text_config()
    length = min(_LENGTH, getattr(config, "max_position_embeddings", _LENGTH))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (_SEQUENCES, length), generator=generator)
    model.eval()
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def _reload(folder: Path, checkpoint: Checkpoint) -> tuple[Any, Mapping[str, torch.Tensor]]:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    source = checkpoint.job.model
    try:
        if (folder / ADAPTER_CONFIG).is_file():
            base = AutoModelForCausalLM.from_pretrained(
                source.path,
                revision=source.revision or "main",
                dtype=checkpoint.stored,
                trust_remote_code=source.trust_remote_code,
            )
            if extends(checkpoint.job):
                rows = vocabulary_of(checkpoint.job).num_tokens
                base.resize_token_embeddings(
                    max(rows, base.get_input_embeddings().weight.shape[0]), mean_resizing=False
                )
            model = PeftModel.from_pretrained(base, folder)
            return model, get_peft_model_state_dict(model, save_embedding_layers=False)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # whatever a broken file raises, the export is not usable
        raise _wrong(f"it cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error
    return model, model.state_dict()


def _require_same(expected: Mapping[str, str], seen: Mapping[str, str]) -> None:
    differing = sorted(name for name in expected.keys() | seen.keys() if expected.get(name) != seen.get(name))
    if differing:
        raise _wrong(f"these tensors are not what was written: {some(differing)}")


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of_tensor(tensor) for name, tensor in tensors.items()}


# An export that never holds the model: tensor by tensor from the parts of a checkpoint into safetensors files.
#
# It is for checkpoints in parts, whose model may fit no host. Memory holds the tensors of one file, and the tensor that
# is on its way. The files are read again and compared, tensor by tensor, and their names are compared with those that
# transformers looks for; logits, which take a whole model, are not computed.


def _export_by_tensor(checkpoint: Checkpoint, to: Path, *, merged: bool) -> bool:
    """Whether the checkpoint could be exported so: False where its base can only be loaded whole."""
    full = checkpoint.job.method.kind == "full"
    found = None if full else _with_adapter(checkpoint)
    if not full and (found is None or (merged and not _is_mergeable(*found))):
        return False
    with _staged(to) as folder:
        if found is None:
            write_full(checkpoint, folder)
        elif merged:
            write_merged(*found, checkpoint, folder)
        else:
            _require_same(write_adapter(found[0], checkpoint, folder), _stored_digests(folder))
        write_json(folder / EXPORT_NOTE, _note(checkpoint, merged=merged))
    return True


class _Writer:
    """Tensors into files of some size, in the layout of transformers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0
        self.digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more tensor."""
        held = sum(each.nbytes for each in self._waiting.values())
        if self._waiting and held + tensor.nbytes > FILE_BYTES:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes
        self.digests[name] = digest_of_tensor(tensor)

    def finish(self) -> None:
        """The last file, and where everything lies."""
        self._flush()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        for number, name in enumerate(names):
            (self._folder / f"{number}.part").rename(self._folder / name)
        if count > 1:
            where = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(where.items()))}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._folder / f"{len(self._files)}.part", {"format": "pt"})
        self._files.append(list(self._waiting))
        self._waiting = {}


def write_full(checkpoint: Checkpoint, folder: Path) -> None:
    """A model of which every weight was trained. Raises CheckpointError, ModelError, RunFailed."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _skeleton(checkpoint)
    writer = _Writer(folder)
    for name, value in _full_weights(checkpoint, model):
        stored = value.to(checkpoint.stored) if value.is_floating_point() else value
        for key, tensor in revert_weight_conversion(model, {name: stored}).items():
            writer.add(key, tensor)
    _complete(writer, model, checkpoint, folder)


def _is_mergeable(model: nn.Module, files: Files) -> bool:
    """Whether all adapted weights are matrices that lie in the files as they are."""
    names = {f"{name}.weight" for name, _ in adapted_layers(base_of(model))}
    return names <= files.rows.keys() and not any(files.rows[name].by_expert for name in names)


def write_merged(model: nn.Module, files: Files, checkpoint: Checkpoint, folder: Path) -> None:
    """The base model with the adapter merged into it. Raises as `write_full` does."""
    core = base_of(model)
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(core)}
    for name, layer in layers.items():
        refuse_shared(model, name, layer.get_base_layer().weight)
    buffers = dict(core.named_buffers())
    writer = _Writer(folder)
    for name in files.rows:
        dtype = buffers[name].dtype if name in buffers else checkpoint.stored
        for key, value in read_whole(files, name):
            merged = merged_weight(layers[name], value) if name in layers else value
            writer.add(key, merged.to(dtype))
    _complete(writer, _skeleton(checkpoint), checkpoint, folder)


def _complete(writer: _Writer, model: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the rest of a model's folder, and read all of it again."""
    writer.finish()
    _write_surroundings(model, checkpoint, folder)
    _require_same(writer.digests, _stored_digests(folder))
    written = replace(checkpoint.job, model=replace(checkpoint.job.model, path=str(folder), start="pretrained"))
    if Files.covering(folder, _skeleton(replace(checkpoint, job=written))) is None:
        raise _wrong("transformers would look for tensors of other names")


def _skeleton(checkpoint: Checkpoint) -> Any:
    """The model without weights; buffers are there."""
    from accelerate import init_empty_weights

    job = checkpoint.job
    with init_empty_weights(include_buffers=False):
        model = model_of(_config(job), job.model, dtype=checkpoint.stored)
    model.tie_weights()
    return model


def _config(job: Job) -> Any:
    """As the trained model has it."""
    config = load_config(job.model)
    if extends(job):
        extend_config(config, vocabulary_of(job))
    return config


def _full_weights(checkpoint: Checkpoint, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a folder of this model holds, one after the other."""
    blocks, saved = open_saved(checkpoint, {f"model.{name}": each for name, each in model.named_parameters()})
    for name, empty in saved.items():
        value = torch.empty_like(empty, device="cpu")
        blocks.read({name: value})
        check_weight(name.removeprefix("model."), value)
        yield name.removeprefix("model."), value
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = [name for name in model.state_dict() if name not in every]
    yield from _buffers(checkpoint, model, kept) if kept else ()


def _buffers(checkpoint: Checkpoint, model: nn.Module, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is saved with weights and not trained: of the base model."""
    if checkpoint.job.model.start == "random":
        buffers = dict(model.named_buffers())
        yield from ((name, buffers[name]) for name in names)
        return
    files = Files.covering(weights_folder(checkpoint.job.model), model)
    if files is None:
        raise ModelError(
            f"{checkpoint.job.model.path} cannot be read tensor by tensor",
            seen=f"expected safetensors files with {', '.join(names[:3])}, which are not trained and in no checkpoint",
            fix="copy the model to a folder with safetensors files, and name that as model.path in job.json of the run",
        )
    for name in names:
        yield from read_whole(files, name)


def _with_adapter(checkpoint: Checkpoint) -> tuple[nn.Module, Files] | None:
    """The model with its adapter, and without the weights of its base."""
    job = checkpoint.job
    job = replace(job, method=replace(job.method, kind="lora"), activation_checkpointing=False)
    found = meta_model(job, compute=checkpoint.stored)
    if found is None:
        return None
    read_trained(checkpoint, found[0])
    check_weights(found[0])
    return found


def _write_surroundings(model: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """What else belongs to a model's folder, in the words of transformers."""
    model.config.dtype = str(checkpoint.stored).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    tokenizer = _tokenizer(checkpoint)
    if model.can_generate():
        _stop_where_turns_end(model, tokenizer, checkpoint)
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _stored_digests(folder: Path) -> dict[str, str]:
    """The digest of every tensor in the files of a folder, read one at a time. Raises RunFailed."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, str] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as stream:
                found |= {name: digest_of_tensor(stream.get_tensor(name)) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _wrong(f"it cannot be read again: {type(error).__name__}: {str(error)[:300]}") from error
    return found


def _note(checkpoint: Checkpoint, *, merged: bool) -> dict[str, Any]:
    job = checkpoint.job
    return {
        "run": checkpoint.run_id,
        "step": checkpoint.step,
        "base_model": job.model.path,
        "method": job.method.kind,
        "merged": merged,
        "format": job.data.format,
        "gangline": __version__,
    }


@contextmanager
def _staged(to: Path) -> Iterator[Path]:
    """A folder beside `to` that becomes `to` when all went well, and vanishes otherwise."""
    folder = to.with_name(f"{to.name}.tmp")
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise UsageError(
            f"{folder} is there already",
            seen="another export is writing it, or one was interrupted",
            fix="wait for the other one, or remove the folder",
        ) from None
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:
            sync_folder(path)
        refuse_existing(to)
        folder.rename(to)
        sync_folder(to.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def refuse_existing(to: Path) -> None:
    """Raises UsageError where something is there already."""
    if to.exists() or to.is_symlink():
        raise UsageError(
            f"{to} is there already", seen="an export never writes over anything", fix="name another folder with --to"
        )


def _refuse_useless(checkpoint: Checkpoint, *, merged: bool) -> None:
    method, start = checkpoint.job.method.kind, checkpoint.job.model.start
    if merged and method == "full":
        raise UsageError(
            "--merged: there is no adapter to merge",
            seen="this run trained every weight, so its export is a whole model",
            fix="leave --merged out",
        )
    if method != "full" and start == "random" and not merged:
        raise UsageError(
            "an adapter over random weights is of no use without them",
            seen=f"model.start: random with method: {method}",
            fix="export with --merged",
        )


def _wrong(seen: str) -> RunFailed:
    return RunFailed(
        "what was written is not the trained model; it was removed",
        seen=seen,
        fix="export again; if it comes back, check the disk, and whether the base model's folder was changed",
    )

"""`python -m gangline.worker export RUN --checkpoint PART --to DIR [--merged]`: a trained model for others to use.

LoRA and QLoRA give an adapter in peft's format, or with --merged a whole model in the precision of the base model,
whose weights are its own and never quantised ones; full fine-tuning gives a whole model. Nothing is called done before
the folder was loaded again by plain transformers and peft, every tensor was what it should be, and the logits were
those of the trained model. A checkpoint in parts is written, and read again, tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline import __version__
from gangline.errors import ModelError, RunFailed, UsageError
from gangline.runs.files import sync_folder, write_json
from gangline.worker.data.model_folder import weights_folder
from gangline.worker.model import base_of, load_config, load_tokenizer, trainable
from gangline.worker.restore import Blocks
from gangline.worker.trained import (
    Checkpoint,
    Trained,
    adapted_layers,
    check_weight,
    check_weights,
    digest_of_tensor,
    hush_libraries,
    load_trained,
    merge_adapter,
    misfit,
    open_checkpoint,
    refuse_shared,
)
from gangline.worker.weights import Files, meta_model, read_whole

# An export that never holds the model: tensor by tensor from the parts of a checkpoint into safetensors files.
#
# For checkpoints in parts, whose model may fit no host. At the most one file's worth of tensors is in memory, and the
# tensor that is on its way. What was written is read again and compared, tensor by tensor, and its names are held
# against those that transformers looks for; logits, which take a whole model, are not computed.


FILE_BYTES = 2 << 30
"""Of one file at the most, unless a single tensor is larger."""


class Wrong(Exception):
    """What was written is not what was to be."""


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


def write_full(checkpoint: Checkpoint, folder: Path) -> int:
    """A model of which every weight was trained; the number of tensors. Raises CheckpointError, ModelError, Wrong."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _skeleton(checkpoint)
    writer = _Writer(folder)
    for name, value in _full_weights(checkpoint, model):
        stored = value.to(checkpoint.stored) if value.is_floating_point() else value
        for key, tensor in revert_weight_conversion(model, {name: stored}).items():
            writer.add(key, tensor)
    writer.finish()
    _write_surroundings(model, checkpoint, folder)
    _compare(folder, writer.digests)
    _require_loadable(folder, checkpoint)
    return len(writer.digests)


def write_merged(checkpoint: Checkpoint, folder: Path) -> int | None:
    """The base model with the adapter folded in; None where the base cannot be read by parts, or its adapters are none
    of matrices. Raises as `write_full` does.
    """
    found = _with_adapter(checkpoint)
    if found is None:
        return None
    model, files = found
    core = base_of(model)
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(core)}
    if not layers.keys() <= files.rows.keys() or any(files.rows[name].by_expert for name in layers):
        return None
    for name, layer in layers.items():
        refuse_shared(model, name, layer.get_base_layer().weight)
    buffers = dict(core.named_buffers())
    writer = _Writer(folder)
    for name in files.rows:
        dtype = buffers[name].dtype if name in buffers else checkpoint.stored
        for key, value in read_whole(files, name):
            merged = _merged(layers[name], value) if name in layers else value
            writer.add(key, merged.to(dtype))
    writer.finish()
    _write_surroundings(_skeleton(checkpoint), checkpoint, folder)
    _compare(folder, writer.digests)
    _require_loadable(folder, checkpoint)
    return len(writer.digests)


def write_adapter_alone(checkpoint: Checkpoint, folder: Path) -> int | None:
    """The adapter in peft's format; None where its base cannot be read by parts. Raises as `write_full` does."""
    from peft import get_peft_model_state_dict

    found = _with_adapter(checkpoint)
    if found is None:
        return None
    model: Any = found[0]
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision = checkpoint.job.model.path, checkpoint.job.model.revision
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    _compare(folder, {name: digest_of_tensor(tensor) for name, tensor in tensors.items()})
    return len(tensors)


def _skeleton(checkpoint: Checkpoint) -> Any:
    """The model without weights; buffers are there."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    job = checkpoint.job
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            load_config(job.model), trust_remote_code=job.model.trust_remote_code, dtype=checkpoint.stored
        )
    model.tie_weights()
    return model


def _full_weights(checkpoint: Checkpoint, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a folder of this model holds, one after the other."""
    blocks = Blocks(checkpoint.parts)
    blocks.open_all()
    saved = {name: each for name, each in blocks.empty().items() if name.startswith("model.")}
    wanted = {f"model.{name}": each for name, each in model.named_parameters()}
    if problem := misfit(wanted, saved, checkpoint):
        raise problem
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
    model, files = found
    wanted = {f"model.{name}": each.detach() for name, each in trainable(model).items()}
    blocks = Blocks(checkpoint.parts)
    blocks.open_all()
    saved = {name: each for name, each in blocks.empty().items() if name.startswith("model.")}
    if problem := misfit(wanted, saved, checkpoint):
        raise problem
    blocks.read(wanted)
    check_weights(model)
    return model, files


@torch.no_grad()
def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + scale * B A in fp32, as `merge_adapter` has it."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = (total + layer.get_delta_weight(adapter).float()).to(weight.dtype).float()
    return total


def _write_surroundings(model: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """What else belongs to a model's folder, in the words of transformers."""
    model.config.dtype = str(checkpoint.stored).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    load_tokenizer(checkpoint.job.model).save_pretrained(folder)


def _compare(folder: Path, expected: Mapping[str, str]) -> None:
    """Read everything again, a tensor at a time."""
    from safetensors import SafetensorError, safe_open

    left = dict(expected)
    differing: list[str] = []
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as stream:
                names = list(stream.keys())
                differing += [
                    name for name in names if left.pop(name, None) != digest_of_tensor(stream.get_tensor(name))
                ]
    except (SafetensorError, OSError) as error:
        raise Wrong(f"it cannot be read again: {type(error).__name__}: {str(error)[:300]}") from error
    if differing or left:
        raise Wrong(f"these tensors are not what was written: {', '.join(sorted([*differing, *left])[:3])}")


def _require_loadable(folder: Path, checkpoint: Checkpoint) -> None:
    written = replace(checkpoint.job, model=replace(checkpoint.job.model, path=str(folder), start="pretrained"))
    if Files.covering(folder, _skeleton(replace(checkpoint, job=written))) is None:
        raise Wrong("transformers would look for tensors of other names")


NOTE_FILE = "gangline.json"
"""Where the folder came from: run, step, base model, and the form of its prompts."""

_EXACT = 1e-4
_SEQUENCES, _LENGTH = 2, 32

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was written, and how far it is from the model in memory."""

    folder: str
    files: tuple[str, ...]
    max_logit_difference: float | None
    """Largest difference of a logit, over the largest logit; None: the model was never loaded, every tensor was
    compared."""
    tolerance: float
    """What the difference may be: 1e-4, or four rounding steps of the dtype where weights were rounded to it."""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the written folder has to give back."""

    logits: torch.Tensor
    tensors: dict[str, str]
    """Digest of every written tensor by name."""
    tolerance: float
    dtype: torch.dtype


def export_main(argv: list[str]) -> int:
    """Read the command line, export, and tell of it in JSON lines on stdout."""
    parser = argparse.ArgumentParser(prog="gangline.worker export")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a part of a committed checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--merged", action="store_true", help="merge the adapter into the model and write the whole model"
    )
    words = parser.parse_args(argv)
    hush_libraries()
    done = export(words.run, words.checkpoint, words.to, merged=words.merged, say=_say)
    _write_line({"kind": "result", **asdict(done)})
    return 0


def export(run: Path, part: Path, to: Path, *, merged: bool = False, say: Say = lambda _text: None) -> Export:
    """Write the model of a checkpoint to the new folder `to`, load it again and compare.

    say: told of each step. Raises UsageError, ModelError, CheckpointError; RunFailed when what was written is not
    the trained model, and then `to` does not exist.
    """
    _refuse_existing(to)
    checkpoint = open_checkpoint(run, part)
    _refuse_useless(checkpoint, merged=merged)
    if checkpoint.in_parts and (done := _export_by_tensor(checkpoint, to, merged=merged, say=say)) is not None:
        return done
    say("loading the trained model")
    trained = load_trained(run, part)
    check_weights(trained.model)
    if trained.job.method.kind == "qlora":
        say(f"over the base model's own weights: in training they were rounded to {trained.job.method.bits} bits")
    lora = trained.job.method.kind != "full" and not merged
    with _staged(to) as folder:
        say("writing")
        expected = write_adapter(trained, folder) if lora else write_model(trained, folder)
        write_json(folder / NOTE_FILE, _note(checkpoint, merged=merged))
        trained.model.to("meta")
        say("loading what was written, and comparing")
        difference = verify(folder, expected, trained)
    return Export(
        folder=str(to),
        files=_files_of(to),
        max_logit_difference=difference,
        tolerance=expected.tolerance,
        dtype=str(expected.dtype).removeprefix("torch."),
    )


def _export_by_tensor(checkpoint: Checkpoint, to: Path, *, merged: bool, say: Say) -> Export | None:
    """The same of a checkpoint in parts, by a process that never holds the model; None where its base can only be
    loaded whole.
    """
    if checkpoint.job.method.kind == "qlora":
        say(f"over the base model's own weights: in training they were rounded to {checkpoint.job.method.bits} bits")
    say("writing tensor by tensor, and reading again what was written")
    try:
        with _staged(to) as folder:
            write = (
                write_full if checkpoint.job.method.kind == "full" else write_merged if merged else write_adapter_alone
            )
            if write(checkpoint, folder) is None:
                raise _LoadedWholeOnly
            write_json(folder / NOTE_FILE, _note(checkpoint, merged=merged))
    except _LoadedWholeOnly:
        say("the base model cannot be read tensor by tensor: it is loaded whole")
        return None
    except Wrong as error:
        raise _wrong(str(error)) from error
    dtype = str(checkpoint.stored).removeprefix("torch.")
    return Export(folder=str(to), files=_files_of(to), max_logit_difference=None, tolerance=0.0, dtype=dtype)


class _LoadedWholeOnly(Exception):
    """The folder that was begun is to go."""


def _files_of(to: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()))


def write_adapter(trained: Trained, folder: Path) -> Expected:
    """Write the adapter in peft's format."""
    from peft import get_peft_model_state_dict

    model = trained.model
    config = model.peft_config["default"]
    config.base_model_name_or_path = trained.job.model.path
    config.revision = trained.job.model.revision
    expected = Expected(
        logits=probe(model),
        tensors=_digests(get_peft_model_state_dict(model, save_embedding_layers=False)),
        tolerance=_EXACT,
        dtype=trained.stored,
    )
    # The embeddings are not trained; "auto" would ask the hub whether they were.
    model.save_pretrained(folder, save_embedding_layers=False)
    # peft's model card is a form with nothing filled in.
    (folder / "README.md").unlink(missing_ok=True)
    return expected


def write_model(trained: Trained, folder: Path) -> Expected:
    """Write a whole model in the dtype in which its base is stored, with the tokenizer."""
    logits = probe(trained.model)
    lora = trained.job.method.kind != "full"
    rounded = trained.stored is not torch.float32
    base = merge_adapter(trained.model) if lora else trained.model.to(trained.stored)
    expected = Expected(
        logits=logits,
        tensors=_digests(base.state_dict()),
        tolerance=max(_EXACT, 4 * torch.finfo(trained.stored).eps) if rounded else _EXACT,
        dtype=trained.stored,
    )
    base.save_pretrained(folder)
    load_tokenizer(trained.job.model).save_pretrained(folder)
    return expected


def verify(folder: Path, expected: Expected, trained: Trained) -> float:
    """Load `folder` as a stranger would, and compare; the difference of the logits. Raises RunFailed."""
    model, tensors = _reload(folder, trained)
    _compare_tensors(expected.tensors, tensors)
    logits = probe(model)
    difference = float((logits - expected.logits).abs().max() / expected.logits.abs().max())
    # Written so that NaN fails, too.
    if not difference <= expected.tolerance:
        raise _wrong(
            f"expected logits within {expected.tolerance:.1e} of the trained model's (relative to the largest, "
            f"{expected.dtype}); seen {difference:.1e}"
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


def _reload(folder: Path, trained: Trained) -> tuple[Any, Mapping[str, torch.Tensor]]:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    trust = trained.job.model.trust_remote_code
    try:
        if (folder / "adapter_config.json").is_file():
            base = AutoModelForCausalLM.from_pretrained(
                trained.job.model.path,
                revision=trained.job.model.revision or "main",
                dtype=trained.stored,
                trust_remote_code=trust,
            )
            model = PeftModel.from_pretrained(base, folder)
            return model, get_peft_model_state_dict(model, save_embedding_layers=False)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # whatever a broken file raises, the export is not usable
        raise _wrong(f"it cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error
    return model, model.state_dict()


def _compare_tensors(expected: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    seen = _digests(tensors)
    differing = sorted(name for name in expected.keys() | seen.keys() if expected.get(name) != seen.get(name))
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise _wrong(f"these tensors are not what was written: {', '.join(differing[:3])}{more}")


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of_tensor(tensor) for name, tensor in tensors.items()}


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
            _sync(path)
        _refuse_existing(to)
        folder.rename(to)
        sync_folder(to.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_existing(to: Path) -> None:
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


def _say(text: str) -> None:
    _write_line({"kind": "progress", "text": text})


def _write_line(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()

"""`python -m gangline.worker merge --adapter FOLDER --weight 0.7 ... --to DIR --method cat`: several adapters in one.

peft's `add_weighted_adapter` does the arithmetic, over the base model that all of them name. The new adapter is loaded
again and its logits are compared; only then does the folder have its name.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gangline import __version__
from gangline.errors import ModelError, RunFailed, UsageError
from gangline.runs.files import read_json, write_json
from gangline.runs.job import ModelJob
from gangline.runs.layout import ADAPTER_CONFIG, EXPORT_NOTE, MODEL_CARD
from gangline.runs.manifest import digest_of
from gangline.worker.export import probe
from gangline.worker.generate import loading
from gangline.worker.gguf import new_folder
from gangline.worker.json_lines import write_line
from gangline.worker.trained import hush_libraries

WEIGHTS = "adapter_model.safetensors"
SAME_RANK = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
"""Methods that combine the matrices A with each other, and the matrices B: all adapters have the same rank."""
PRUNING = (
    *("ties", "dare_linear", "dare_ties", "magnitude_prune"),
    *("ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd"),
)
"""Methods with a density, the part of the values that stays; those that end with _svd work on B A."""
UNMERGED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that are trained",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters",
    "lora_bias": "biases of adapters",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "tokens from which on it works",
}
"""Keys of adapter_config.json that `add_weighted_adapter` leaves out or refuses."""
SELECTING = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Keys that choose layers, of which the new adapter gets those of the first: layers of the others would be lost."""
_EXACT = 1e-4


def merge_main(argv: list[str]) -> int:
    """Read the command line, merge, and report in JSON lines on stdout."""
    parser = argparse.ArgumentParser(prog="gangline.worker merge")
    parser.add_argument("--adapter", type=Path, action="append", required=True, help="a folder with an adapter")
    parser.add_argument("--weight", type=float, action="append", required=True, help="the weight of each, in order")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make")
    parser.add_argument("--method", default="cat", help="one of peft's, which gangline.cli.merge lists")
    parser.add_argument("--density", type=float, help="the part of the values that stays")
    parser.add_argument("--rank", type=int, help="of the result, for svd and the methods that end with it")
    parser.add_argument("--seed", type=int, default=0, help="for dare, which drops values at random")
    options = parser.parse_args(argv)
    hush_libraries()
    write_line("result", **merge(options))
    return 0


def merge(options: argparse.Namespace) -> dict[str, Any]:
    """Write one adapter out of several: the record of it. Raises UsageError, ModelError, before anything is written;
    RunFailed where the written adapter does not give the same logits.
    """
    refuse_options(options)
    configs = [_config_of(folder) for folder in options.adapter]
    refuse_unlike(options.adapter, configs, options.method)
    write_line("progress", text="loading the base model")
    model = _with_adapters(options.adapter, configs[0])
    names = [f"a{number}" for number in range(len(configs))]
    # the scales of the layers are set; in the copy of this configuration the scale has to be alpha / rank = 1
    model.peft_config[names[0]].use_rslora = False
    write_line("progress", text=f"merging by {options.method}")
    torch.manual_seed(options.seed)
    model.add_weighted_adapter(
        adapters=names,
        weights=list(options.weight),
        adapter_name="default",
        combination_type=options.method,
        svd_rank=options.rank,
        svd_full_matrices=False,
        density=options.density,
    )
    model.set_adapter("default")
    expected = probe(model)
    with new_folder(options.to) as fresh:
        model.save_pretrained(fresh, selected_adapters=["default"], save_embedding_layers=False)
        (fresh / MODEL_CARD).unlink(missing_ok=True)
        note = _note(options, configs[0])
        write_json(fresh / EXPORT_NOTE, note)
        write_line("progress", text="loading what was written, and comparing")
        difference = _compare(model, fresh, expected)
    rank = read_json(options.to / ADAPTER_CONFIG)["r"]
    return {"folder": str(options.to), "rank": rank, "max_logit_difference": difference, "note": note}


def refuse_options(options: argparse.Namespace) -> None:
    """Raise UsageError for numbers that do not fit each other or the method."""
    if len(options.adapter) != len(options.weight) or len(options.adapter) < 2:
        raise UsageError(
            "there is nothing to merge",
            seen=f"{len(options.adapter)} adapters, {len(options.weight)} weights; expected two or more of both",
            fix="gangline merge FOLDER:0.7 FOLDER:0.3 --to DIR",
        )
    if bad := [weight for weight in options.weight if not math.isfinite(weight) or weight == 0]:
        raise UsageError(
            f"an adapter has the weight {bad[0]}",
            seen="expected a number that is not 0; negative ones take an adapter away",
            fix="leave the adapter out, or give it a weight",
        )
    prunes = options.method in PRUNING
    if prunes and options.density is None:
        raise UsageError(
            f"--method {options.method} needs a density",
            seen="no --density, the part of the values that stays",
            fix="--density 0.5 keeps half of them",
        )
    if options.density is not None and (not prunes or not 0 < options.density <= 1):
        raise UsageError(
            f"--density {options.density:g} does not fit --method {options.method}",
            seen=f"expected a number above 0 and at most 1, with {', '.join(PRUNING)}",
            fix="leave it out, or take one of these methods",
        )
    if options.rank is not None and (not options.method.endswith("svd") or options.rank < 1):
        raise UsageError(
            f"--rank {options.rank} does not fit --method {options.method}",
            seen="expected 1 or more, with svd or a method that ends with _svd",
            fix="leave it out; cat has the sum of the ranks, the others have that of the adapters",
        )


def _config_of(folder: Path) -> dict[str, Any]:
    for name in (ADAPTER_CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder} holds no adapter",
                seen=f"expected {name} in it",
                fix="gangline export RUN writes the adapter of a run; name its folder",
            )
    return dict(read_json(folder / ADAPTER_CONFIG))


def refuse_unlike(folders: Sequence[Path], configs: Sequence[Mapping[str, Any]], method: str) -> None:
    """Raise ModelError for adapters of unlike base models, and for those that peft's method cannot combine."""
    for folder, config in zip(folders, configs, strict=True):
        kinds = [] if config.get("peft_type") == "LORA" else [f"peft type {config.get('peft_type')}"]
        kinds += [] if config.get("bias", "none") == "none" else ["trained biases"]
        if kinds := kinds + [name for key, name in UNMERGED.items() if config.get(key)]:
            raise ModelError(
                f"{folder} cannot be merged with another adapter",
                seen=f"it has {', '.join(kinds)}; expected matrices A and B alone",
                fix="merge each into its base model instead: gangline export RUN --merged",
            )
    bases = [(config.get("base_model_name_or_path"), config.get("revision") or "main") for config in configs]
    if len(set(bases)) > 1:
        raise ModelError(
            "the adapters lie over different base models",
            seen=", ".join(f"{folder}: {base} {revision}" for folder, (base, revision) in _zip(folders, bases)),
            fix="merge adapters of one base model; where it lies twice, write one path into each adapter_config.json",
        )
    ranks = [(config["r"], tuple(sorted((config.get("rank_pattern") or {}).items()))) for config in configs]
    if method in SAME_RANK and len(set(ranks)) > 1:
        raise ModelError(
            f"--method {method} combines adapters of one rank",
            seen=", ".join(
                f"{folder}: {rank}{' and others' * bool(rest)}" for folder, (rank, rest) in _zip(folders, ranks)
            ),
            fix="--method cat or svd, which take any ranks",
        )
    if unlike := [key for key in SELECTING if any(_chosen(each, key) != _chosen(configs[0], key) for each in configs)]:
        raise ModelError(
            "the adapters choose their layers differently",
            seen=f"unlike {' and '.join(unlike)} in adapter_config.json; layers of one would be left out",
            fix="merge each into the base model in turn instead: gangline export RUN --merged",
        )
    kinds_of_targets = {type(config.get("target_modules")) for config in configs}
    if len(kinds_of_targets) > 1:
        raise ModelError(
            "the adapters name their layers in different forms",
            seen="a pattern and a list of names in target_modules of adapter_config.json",
            fix="write the names of the layers into both",
        )


def _chosen(config: Mapping[str, Any], key: str) -> list[str]:
    """The value of a key that chooses layers, whatever the order."""
    value = config.get(key)
    return sorted(map(str, value)) if isinstance(value, list) else [] if value is None else [str(value)]


def _zip(folders: Sequence[Path], values: Sequence[Any]) -> list[tuple[Path, Any]]:
    return list(zip(folders, values, strict=True))


def _with_adapters(folders: Sequence[Path], config: Mapping[str, Any]) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source = ModelJob(path=config["base_model_name_or_path"], revision=config.get("revision"))
    with loading(source.path, folders[0]):
        base = AutoModelForCausalLM.from_pretrained(source.path, revision=source.revision or "main", dtype="auto")
        model = PeftModel.from_pretrained(base, folders[0], adapter_name="a0")
        for number, folder in enumerate(folders[1:], 1):
            model.load_adapter(folder, adapter_name=f"a{number}")
    return model


def _note(options: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the folder says of itself, in the form of an export's."""
    parts, forms = [], set()
    for folder, weight in zip(options.adapter, options.weight, strict=True):
        note = read_json(folder / EXPORT_NOTE) if (folder / EXPORT_NOTE).is_file() else {}
        forms.add(note.get("format", "text"))
        digest = digest_of((folder / WEIGHTS).read_bytes())
        parts.append(
            {"run": note.get("run", folder.name), "step": note.get("step"), "weight": weight, "blake2b": digest}
        )
    how = {"method": options.method, "density": options.density, "rank": options.rank, "seed": options.seed}
    return {
        "run": " and ".join(str(part["run"]) for part in parts),
        "base_model": config["base_model_name_or_path"],
        "method": "lora",
        "merged": False,
        "format": forms.pop() if len(forms) == 1 else "text",
        "adapters": parts,
        "merge": how,
        "gangline": __version__,
    }


def _compare(model: Any, folder: Path, expected: torch.Tensor) -> float:
    """The difference of the logits, over the largest, once plain peft has loaded the folder."""
    from peft import PeftModel

    again = PeftModel.from_pretrained(model.unload(), folder)
    difference = float((probe(again) - expected).abs().max() / expected.abs().max())
    if not difference <= _EXACT:  # written so that NaN fails, too
        raise RunFailed(
            "the written adapter does not give the logits of the merged one; it was removed",
            seen=f"expected a difference of at most {_EXACT:.0e} of the largest; seen {difference:.1e}",
            fix="another method or smaller weights, if it is not finite; else check the disk, and merge again",
        )
    return difference

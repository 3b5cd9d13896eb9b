"""What happens in the process of test_merge: adapters are merged, and compared with sums computed here by hand."""

import contextlib
import io
import json
import math
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gangline.errors import GanglineError
from gangline.worker.adapter_merge import merge_main
from tests.train.cases_export import logits, relative
from tests.train.tiny import write_model


def adapter(folder, base, *, seed, rank=4, alpha=8.0, targets=("q_proj", "down_proj"), **more):
    """An adapter with random matrices A and B, and its scale."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM", init_lora_weights=False, **more
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return alpha / (math.sqrt(rank) if more.get("use_rslora") else rank)


def matrices(folder):
    """Layer -> its A and B."""
    found = {}
    for name, value in load_file(Path(folder) / "adapter_model.safetensors").items():
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        found.setdefault(layer, {})[side] = value
    return found


def by_hand(base, parts, *, linear):
    """Logits of the base model with the weighted changes added: parts are (folder, weight, scale)."""
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = dict(model.named_parameters())
    sums = {}
    for folder, weight, scale in parts:
        for layer, each in matrices(folder).items():
            if linear:  # A with A and B with B, the sign on one side
                root = math.sqrt(abs(weight * scale))
                one, other = sums.get(layer, (0, 0))
                sums[layer] = (one + math.copysign(root, weight) * each["A"], other + root * each["B"])
            else:
                sums[layer] = sums.get(layer, 0) + weight * scale * (each["B"] @ each["A"])
    with torch.no_grad():
        for layer, change in sums.items():
            weights[f"{layer}.weight"] += change[1] @ change[0] if linear else change
    return logits(model)


def run(folder, *words):
    """The lines of the worker, and its error."""
    said, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            merge_main([*words, "--to", str(Path(folder) / "out")])
    except GanglineError as caught:
        error = caught.to_json()
    return [json.loads(line) for line in said.getvalue().splitlines()], error


def merged(folder, *, method, first=None, second=None, weights=(0.7, 0.3), options=()):
    """How far a stranger's logits of the merged adapter are from those by hand, and what was written."""
    folder = Path(folder)
    base, parts, words = folder / "base", [], ["--method", method, *options]
    write_model(base, "llama")
    for number, (weight, how) in enumerate(zip(weights, (first, second), strict=True)):
        scale = adapter(folder / f"a{number}", base, seed=number, **(how or {}))
        parts.append((folder / f"a{number}", weight, scale))
        words += ["--adapter", str(folder / f"a{number}"), f"--weight={weight}"]
    lines, error = run(folder, *words)
    if error is not None:
        return {"error": error, "there": (folder / "out").exists()}
    seen = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "out"))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    return {
        **lines[-1],
        "by_hand": relative(seen, by_hand(base, parts, linear=method == "linear")),
        "from_base": relative(seen, plain),
        "files": sorted(path.name for path in (folder / "out").iterdir()),
    }


def refused(folder, *, what):
    """The error of a merge that must not begin, and whether anything was written."""
    folder, words = Path(folder), []
    for number in range(2):
        base = folder / (f"base{number}" if what == "bases" else "base")
        write_model(base, "llama")
        more = {"use_dora": True} if what == "dora" and number else {}
        more |= {"layers_to_transform": [number]} if what == "layers" else {}
        more |= {"exclude_modules": ["q_proj"]} if what == "excluded" and not number else {}
        adapter(folder / f"a{number}", base, seed=number, **more)
        words += ["--adapter", str(folder / f"a{number}"), f"--weight={'nan' if what == 'weight' else 1}"]
    if what == "no-weights":
        (folder / "a1/adapter_model.safetensors").unlink()
    if what == "alone":
        words = words[:3]
    words += {"density": ["--method", "ties"], "rank": ["--rank", "2"], "much": ["--density", "0.5"]}.get(what, [])
    lines, error = run(folder, *words)
    return {"error": error, "lines": lines, "there": (folder / "out").exists()}

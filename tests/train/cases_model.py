"""What a rank does in test_model: load model folders, good and bad."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import torch

from gangline.errors import GanglineError
from gangline.runs.job import MethodJob, ModelJob
from gangline.worker.model import load_model, trainable
from gangline.worker.tokenizer import load_tokenizer
from tests.train.small import make_job, model_folder


def load_error(folder: str):
    """The error of loading this folder's model, as plain data."""
    return _error_of(make_job(precision="fp32", model=ModelJob(path=folder)))


def lora_error(targets):
    """The error of putting adapters on these modules, as plain data."""
    return _error_of(make_job(precision="fp32", method="lora"), method=MethodJob(kind="lora", targets=tuple(targets)))


def _error_of(job, **changes):
    try:
        load_model(replace(job, **changes))
    except GanglineError as error:
        return error.to_json()
    return None


def tokenizer_error(folder: str):
    """The error of loading this folder's tokenizer, as plain data."""
    try:
        load_tokenizer(ModelJob(path=folder))
    except GanglineError as error:
        return error.to_json()
    return None


def write_folder(folder: str, *, kind: str, auto_map: str | None = None):
    """A model folder: without weights, with old-style weights, or with a pickle that would write a file."""
    target = Path(folder)
    target.mkdir()
    config = json.loads((Path(model_folder()) / "config.json").read_text())
    if auto_map:
        config["model_type"] = auto_map
        config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
        (target / "evil.py").write_text(f"open({str(target / 'canary')!r}, 'w')\n")
    (target / "config.json").write_text(json.dumps(config))
    if kind == "old":
        torch.save(_weights(), target / "pytorch_model.bin")
    if kind == "evil":
        torch.save({"model.norm.weight": _Canary(str(target / "canary"))}, target / "pytorch_model.bin")


class _Canary:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def _weights():
    return load_model(make_job(precision="fp32")).state_dict()


def old_weights_equal(folder: str):
    """Whether a folder with pytorch_model.bin gives the weights that were written."""
    loaded = load_model(make_job(precision="fp32", model=ModelJob(path=folder))).state_dict()
    return all(torch.equal(loaded[name], value) for name, value in _weights().items())


def dtypes(method: str, *, parameters: str):
    """Dtypes of trained and of frozen weights under bf16 compute."""
    model = load_model(make_job(method=method, parameters=parameters), compute=torch.bfloat16)
    trained = {str(parameter.dtype) for parameter in trainable(model).values()}
    frozen = {str(parameter.dtype) for parameter in model.parameters() if not parameter.requires_grad}
    return [sorted(trained), sorted(frozen)]


def write_large(folder: str, *, old: bool):
    """A model of about 200 MB in fp32; its size in bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8, vocab_size=4096
    )
    model = LlamaForCausalLM(config)
    if old:
        config.save_pretrained(folder)
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
    else:
        model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def loading_peak(folder: str, *, converted: bool):
    """Anonymous memory at the most while loading, above what was there before, in bytes (sampled at 1 kHz)."""
    before, peak, done = _anonymous_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    compute = torch.bfloat16 if converted else torch.float32
    model = load_model(make_job(parameters="compute", model=ModelJob(path=folder)), compute=compute)
    done.set()
    thread.join()
    return {"peak": peak[0] - before, "held": sum(parameter.nbytes for parameter in model.parameters())}


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")

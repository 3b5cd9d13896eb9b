"""What happens in the process of test_export: runs are made, exported, and loaded as a stranger would."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gangline.errors import GanglineError
from gangline.worker import export as by_tensor_module
from gangline.worker import export as export_module
from gangline.worker.export import export
from gangline.worker.model import load_model, trainable
from tests.train.peak import Peak
from tests.train.tiny import make_job, write_model, write_run, write_tokenizer

TOKENS = torch.arange(2, 42).reshape(2, 20)


def prepare(
    folder, *, kind="llama", method="lora", dtype="float32", model=None, in_parts=False, start="pretrained", **changes
):
    base = Path(folder) / "base"
    write_model(base, kind, dtype=getattr(torch, dtype), **(model or {}))
    write_tokenizer(base)
    job = make_job(base, method=method, **changes)
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, start=start))
    return base, job, *write_run(Path(folder) / "root", job, in_parts=in_parts)


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS, use_cache=False).logits.float()


def reference(base, job, tensors):
    """The trained model, put together here without any code of the project."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if job.method.kind != "full":
        method = job.method
        targets = "all-linear" if method.targets == ("all-linear",) else list(method.targets)
        model = get_peft_model(
            model, LoraConfig(r=method.rank, lora_alpha=method.alpha, target_modules=targets, task_type="CAUSAL_LM")
        )
    state = model.state_dict()
    for name, value in tensors.items():
        state[name] = value
    model.load_state_dict(state)
    return logits(model)


def relative(seen, expected):
    return float((seen - expected).abs().max() / expected.abs().max())


def stranger(base, folder):
    if (folder / "adapter_config.json").exists():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def exported(folder, *, merged=False, **how):
    """Export; what was written, and how far a stranger's logits are from the trained model's and from the base's."""
    base, job, run, part, tensors = prepare(folder, **how)
    said = []
    done = export(run, part, Path(folder) / "out", merged=merged, say=said.append)
    seen = logits(stranger(base, Path(done.folder)))
    return {
        **dataclasses.asdict(done),
        "difference": relative(seen, reference(base, job, tensors)),
        "from_base": relative(seen, logits(AutoModelForCausalLM.from_pretrained(base))),
        "said": said,
        "left": sorted(path.name for path in Path(folder).iterdir()),
    }


def by_tensor(folder, *, merged=False, file_bytes=None, **how):
    """What differs between the exports of a checkpoint that is whole and of one in parts, and what was said."""
    whole, parts = Path(folder) / "whole", Path(folder) / "parts"
    _, _, run, part, _ = prepare(whole, **how)
    export(run, part, whole / "out", merged=merged)
    _, _, run, part, _ = prepare(parts, in_parts=True, **how)
    said, loads = [], []
    plain = export_module.load_trained
    export_module.load_trained = lambda *words: loads.append(words) or plain(*words)
    try:
        if file_bytes is not None:
            by_tensor_module.FILE_BYTES = file_bytes
        done = export(run, part, parts / "out", merged=merged, say=said.append)
    finally:
        export_module.load_trained, by_tensor_module.FILE_BYTES = plain, 2 << 30
    one, other = (_all_tensors(each / "out") for each in (whole, parts))
    return {
        "names": sorted(set(one) ^ set(other)),
        "values": [name for name in one if name in other and not _same(one[name], other[name])],
        "tensors": len(other),
        "files": done.files,
        "configs": [json.loads((each / "out" / _config(merged, how)).read_text()) for each in (whole, parts)],
        "max_logit_difference": done.max_logit_difference,
        "said": said,
        "loads": len(loads),
        "left": sorted(path.name for path in parts.iterdir()),
    }


def _config(merged, how):
    return "config.json" if merged or how.get("method") == "full" else "adapter_config.json"


def _same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


def _all_tensors(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def memory(folder, *, in_parts, file_bytes):
    """Anonymous memory that an export of every weight takes at its peak, and the sizes of what it writes; bytes."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    _, _, run, part, _ = prepare(folder, method="full", model=wide, in_parts=in_parts)
    by_tensor_module.FILE_BYTES = file_bytes
    try:
        with Peak() as peak:
            done = export(run, part, Path(folder) / "out")
    finally:
        by_tensor_module.FILE_BYTES = 2 << 30
    sizes = [(Path(done.folder) / name).stat().st_size for name in done.files if name.endswith(".safetensors")]
    return {"peak": peak.num_bytes, "files": sizes}


def stranger_loads(folder):
    """Whether plain transformers loads what was written in parts, with the logits of what was written whole."""
    one, other = (
        logits(AutoModelForCausalLM.from_pretrained(Path(folder) / each / "out")) for each in ("whole", "parts")
    )
    return bool(torch.equal(one, other))


def dtypes(folder):
    with safe_open(Path(folder) / "out" / "model.safetensors", "pt") as file:
        return sorted({str(file.get_tensor(name).dtype) for name in file.keys()})  # noqa: SIM118 - not a dict


def tokenizer_and_settings(folder, **how):
    base, _, run, part, _ = prepare(folder, **how)
    done = export(run, part, Path(folder) / "out", merged=True)
    model = AutoModelForCausalLM.from_pretrained(done.folder)
    text = "a kettle, 3 cups & the tea"
    return {
        "tokens": AutoTokenizer.from_pretrained(done.folder)(text)["input_ids"],
        "expected_tokens": AutoTokenizer.from_pretrained(base)(text)["input_ids"],
        "use_cache": model.config.use_cache,
        "eos": model.generation_config.eos_token_id,
    }


def refused(folder, *, damage=None, to_exists=False, merged=False, **how):
    """The error of an export that must not succeed, and what lies in the folder afterwards."""
    _, _, run, part, _ = prepare(folder, **how)
    to = Path(folder) / "out"
    if to_exists:
        to.mkdir()
    kept = {name: getattr(export_module, name) for name in ("write_adapter", "write_model")}

    def writing(name):
        def write(trained, checkpoint, target):
            expected = kept[name](trained, checkpoint, target)
            globals()[damage](target)
            return expected

        return write

    try:
        if damage:
            for name in kept:
                setattr(export_module, name, writing(name))
        export(run, part, to, merged=merged)
    except GanglineError as error:
        return {**error.to_json(), "left": sorted(path.name for path in Path(folder).iterdir())}
    finally:
        for name, function in kept.items():
            setattr(export_module, name, function)
    raise AssertionError("the export was not refused")


def _weights(folder):
    return next(path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors")


def one_value_changed(folder):
    tensors = load_file(_weights(folder))
    name = max(tensors)
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, _weights(folder), {"format": "pt"})


def one_tensor_missing(folder):
    tensors = load_file(_weights(folder))
    del tensors[min(tensors)]
    save_file(tensors, _weights(folder), {"format": "pt"})


def file_cut(folder):
    path = _weights(folder)
    path.write_bytes(path.read_bytes()[:-100])


def scale_changed(folder):
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 8.0', '"lora_alpha": 9.0'))


def of_useless_weights(folder, *, what):
    """The error for a fresh adapter, or for one with a value that is no number."""
    base = Path(folder) / "base"
    write_model(base)
    model = load_model(make_job(base))
    if what == "nan":
        with torch.no_grad():
            next(iter(trainable(model).values()))[0, 0] = float("nan")
    try:
        export_module.check_weights(model)
    except GanglineError as error:
        return error.to_json()
    raise AssertionError("these weights were accepted")


def merged_weights_that_differ(folder):
    """Names of merged bf16 weights that are not W + scale * B A in fp32, rounded once."""
    base, job, run, part, tensors = prepare(folder, dtype="bfloat16")
    export(run, part, Path(folder) / "out", merged=True)
    stored, merged = load_file(_weights(base)), load_file(_weights(Path(folder) / "out"))
    wrong, changed = [], 0
    for name in stored:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        expected = stored[name]
        if f"{stem}.lora_A.default.weight" in tensors:
            product = tensors[f"{stem}.lora_B.default.weight"] @ tensors[f"{stem}.lora_A.default.weight"]
            expected = (expected.float() + job.method.alpha / job.method.rank * product).bfloat16()
            changed += 1
        if not torch.equal(merged[name], expected):
            wrong.append(name)
    return {"wrong": wrong, "changed": changed}


def other_part(folder):
    """Exporting a folder that is no part of a committed checkpoint."""
    _, _, run, part, _ = prepare(folder)
    (part.parent / "COMMITTED").unlink()
    try:
        export(run, part, Path(folder) / "out")
    except GanglineError as error:
        return error.to_json()
    raise AssertionError("an uncommitted checkpoint was exported")


def on_the_command_line(folder):
    """What the controller reads."""
    _, _, run, part, _ = prepare(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = export_module.export_main([str(run), "--checkpoint", str(part), "--to", str(Path(folder) / "out")])
    return {"code": code, "lines": [json.loads(line) for line in out.getvalue().splitlines()]}

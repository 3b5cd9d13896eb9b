"""What the ranks do in test_fsdp."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from gangline.errors import GanglineError
from gangline.runs.job import ModelJob
from gangline.worker import session as building
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model
from gangline.worker.weights import meta_model
from tests.train.small import VOCABULARY, make_job, make_session, make_world, mixture_folder, model_folder


def refused(*, precision: str, method: str):
    """Why such a session cannot be built."""
    try:
        make_session(
            make_job(precision=precision, method=method), make_world([5, 5], rank=dist.get_rank(), strategy="fsdp")
        )
    except GanglineError as error:
        return str(error)
    return "it was built"


def read_by_parts(folder: str, *, shares, strategy: str, method: str, experts: int, stored: str = "float32"):
    """Whether a model that no rank has held has the weights, adapters and buffers of one that was loaded whole."""
    job = make_job(method=method, precision="fp32", dropout=0.0 if experts else 0.1)
    job = replace(job, model=ModelJob(path=_saved_model(Path(folder), experts=experts, stored=stored)))
    found = meta_model(job, compute=torch.float32)
    assert found is not None
    assert all(parameter.is_meta for name, parameter in found[0].named_parameters() if ".lora_" not in name)
    session = make_session(job, make_world(shares, rank=dist.get_rank(), strategy=strategy), num_evaluation=0)
    whole = load_model(job, compute=torch.float32)
    ours, expected = dict(session.model.named_parameters()), dict(whole.named_parameters())
    ours |= dict(session.model.named_buffers())
    expected |= dict(whole.named_buffers())
    assert ours.keys() == expected.keys()
    differing = [name for name, tensor in ours.items() if not torch.equal(_whole(tensor), expected[name])]
    return {
        "differing": differing,
        "divided": sum(isinstance(tensor, DTensor) for tensor in ours.values()),
        "along": sorted({_along(tensor) for tensor in ours.values() if isinstance(tensor, DTensor)}),
        "frozen": sum(".lora_" not in name for name in dict(whole.named_parameters())),
        "fused": [session.loss.fused, CausalLoss(whole, compute=torch.float32).fused],
    }


def read_from_the_hub(folder: str, *, strategy: str, method: str):
    """Whether a model of the hub, which lies in its cache, is read by parts as well. What has no network is its cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = Path(folder) / "models--tiny--model"
    _saved_model(place / "snapshots" / commit)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    job = replace(make_job(method=method, precision="fp32"), model=ModelJob(path="tiny/model"))
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_CACHE", folder),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    ):
        with mock.patch.object(building, "load_model", side_effect=AssertionError("a rank loads all of it")):
            session = make_session(job, make_world([7, 3], rank=dist.get_rank(), strategy=strategy), num_evaluation=0)
        whole = load_model(job, compute=torch.float32)
    expected = dict(whole.named_parameters())
    return [
        name
        for name, each in session.model.named_parameters()
        if not torch.equal(_whole(each).detach(), expected[name])
    ]


def read_damaged(folder: str, *, how: str):
    """What a rank says of a file that is cut off, or of weights that are not those of config.json."""
    path = Path(_saved_model(Path(folder)))
    if dist.get_rank() == 0 and how == "cut":
        file = max(path.glob("*.safetensors"), key=lambda each: each.stat().st_size)
        file.write_bytes(file.read_bytes()[:-100])
    if dist.get_rank() == 0 and how == "shape":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY - 6}))
    dist.barrier()
    job = replace(make_job(precision="fp32"), model=ModelJob(path=str(path)))
    try:
        make_session(job, make_world([5, 5], rank=dist.get_rank(), strategy="fsdp"))
    except GanglineError as error:
        return [type(error).__name__, str(error)]
    return ["", "it was built"]


def dropout_in_experts():
    """Why adapters of a mixture of experts cannot have dropout."""
    job = make_job(method="lora", dropout=0.1)
    try:
        load_model(replace(job, model=replace(job.model, path=mixture_folder())))
    except GanglineError as error:
        return str(error)
    return "it was loaded"


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _along(tensor: DTensor) -> int:
    return next(each.dim for each in tensor.placements if isinstance(each, Shard))


def _saved_model(folder: Path, *, experts: int = 0, stored: str = "float32", layers: int = 2, **more) -> str:
    """A folder with weights in several files; experts are there one by one, and a bias that is no weight."""
    from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig

    if dist.get_rank() == 0:
        config = AutoConfig.from_pretrained(model_folder(layers=layers, **more))
        if experts:
            config = Glm4MoeConfig(
                hidden_size=32,
                intermediate_size=64,
                moe_intermediate_size=24,
                n_routed_experts=experts,
                n_shared_experts=1,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                n_group=1,
                topk_group=1,
                vocab_size=VOCABULARY,
                max_position_embeddings=64,
            )
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for buffer in model.buffers():
            if buffer.shape == (experts,):
                buffer.normal_()
        model.to(getattr(torch, stored)).save_pretrained(folder, max_shard_size="40KB")
    dist.barrier()
    return str(folder)

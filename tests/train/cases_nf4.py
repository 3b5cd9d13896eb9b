"""What the ranks do in test_nf4."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import nn

from gangline.errors import GanglineError
from gangline.runs.job import MethodJob
from gangline.worker import quantised as int8
from gangline.worker import quantised as nf4
from gangline.worker.model import base_of, layers_of, load_model
from gangline.worker.pace import step_flops
from gangline.worker.quantised import QuantisedLinear, multiplies, num_weights, quantise
from tests.train.small import MemorySet, make_job, make_session, make_world, mixture_folder, run_loop


def losses_on(device: str, *, method: str, precision: str):
    """Losses of 10 steps of one rank, and whether what it trains is on that device."""
    job = make_job(method=method, precision=precision, dropout=0.0, steps=10)
    session = make_session(job, make_world([10], rank=0, device=device), num_evaluation=0)
    assert {parameter.device.type for parameter in session.model.parameters()} == {device}
    return [loss for _, loss, _ in run_loop(session)[1].steps]


def layers(dtypes, device: str = "cpu"):
    """A linear of 4 bits against bitsandbytes' own, and against a linear over the weights that it stands for."""
    import bitsandbytes

    found = []
    for dtype in (getattr(torch, name) for name in dtypes):
        torch.manual_seed(0)
        stored = torch.float32 if dtype is torch.float64 else dtype
        linear = nn.Linear(128, 40).to(stored)
        own = bitsandbytes.nn.Linear4bit(128, 40, compute_dtype=dtype, quant_type="nf4").to(stored)
        own.load_state_dict({"weight": linear.weight, "bias": linear.bias})
        core = nn.Sequential(nn.ModuleList([nn.Sequential(linear)]))
        kept = linear.weight.detach().clone()
        with patch.object(nf4, "PIECE", 1024):  # in five pieces
            quantise(core, core[0], MethodJob(kind="qlora"), compute=dtype, device=device)
        ours = core.to(device)[0][0][0]
        kept = kept.to(device)
        value = torch.randn(3, 5, 128, dtype=dtype, device=device, requires_grad=True)
        plain = value.detach().clone().requires_grad_()
        weight = ours.unpack(ours.weight, ours.scales)
        for product in (ours(value), nn.functional.linear(plain, weight, ours.bias.to(dtype))):
            product.square().sum().backward()
        own = own.to(device)  # that is where it quantises
        found.append(
            {
                "as bitsandbytes": dtype is torch.float64 or torch.equal(ours(plain), own(plain)),
                "forward": torch.equal(ours(value), nn.functional.linear(value, weight, ours.bias.to(dtype))),
                "backward": torch.equal(value.grad, plain.grad),
                "off": float((weight - kept).float().abs().mean() / kept.abs().mean()),
                "bytes": sum(each.nbytes for name, each in ours.named_parameters() if name != "bias"),
                "stands for": num_weights(core),
            }
        )
    return found


def rows_of_eight_bits(device: str = "cpu"):
    """A linear of 8 bits against bitsandbytes' numbers, and against a linear over the weights that it stands for."""
    from bitsandbytes.functional import int8_vectorwise_quant

    found = []
    for compute in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        torch.manual_seed(0)
        linear = nn.Linear(96, 40).to(torch.float16)
        with torch.no_grad():
            linear.weight[7] = 0
        core = nn.Sequential(nn.ModuleList([nn.Sequential(linear)]))
        kept = linear.weight.detach().clone().to(device)
        with patch.object(int8, "LOT", 1024):  # in four pieces, and unpacked so
            quantise(core, core[0], MethodJob(kind="qlora", bits=8), compute=compute, device=device)
            ours = core.to(device)[0][0][0]
            weight = ours.unpack(ours.weight, ours.scales)
        numbers, scales, _ = int8_vectorwise_quant(kept.clone())
        own = torch.where(kept == 0, 0, numbers)
        value = torch.randn(3, 5, 96, dtype=compute, device=device, requires_grad=True)
        plain = value.detach().clone().requires_grad_()
        for product in (ours(value), nn.functional.linear(plain, weight, ours.bias.to(compute))):
            product.square().sum().backward()
        exact = (ours.weight.double() * ours.scales.double()[:, None] / 127).to(compute)
        found.append(
            {
                "off by": int((ours.weight.int() - own.int()).abs().max()),
                "other numbers": int((ours.weight != own).sum()),
                "scales": torch.equal(ours.scales, scales),
                "unpacked": float(((weight - exact).double().abs() / exact.double().abs().clamp(min=1e-9)).max()),
                "backward": torch.equal(value.grad, plain.grad),
                "off": float(((weight.double() - kept.double()).abs().amax(1) / scales.clamp(min=1e-9)).max()),
                "bytes": sum(each.nbytes for name, each in ours.named_parameters() if name != "bias"),
                "stands for": num_weights(core),
            }
        )
    return found


def what_is_packed(method: str):
    """Names of layers of 4 bits, and of what a job of this method trains; FLOPs of a step."""
    model = load_model(make_job(method=method, precision="fp32"))
    lengths = MemorySet(4).lengths
    return {
        "packed": sorted(name for name, part in model.named_modules() if isinstance(part, QuantisedLinear)),
        "linears": sorted(name for name, part in model.named_modules() if type(part) is nn.Linear),
        "trained": sorted(name for name, each in model.named_parameters() if each.requires_grad),
        "flops": step_flops(model, lengths, full=False),
        "head": type(base_of(model).get_output_embeddings()) is nn.Linear,
    }


def of_another_kind():
    """A Falcon of 8 bits against one with the weights that these stand for; which kinds of linears count as one."""
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, bias=True, initializer_range=0.2
    )
    model = FalconForCausalLM(config).double().eval()
    before = copy.deepcopy(model)
    drawn = torch.get_rng_state()
    quantise(model, layers_of(model), MethodJob(kind="qlora", bits=8), compute=torch.float64, device="cpu")
    is_undrawn = torch.equal(drawn, torch.get_rng_state())
    plain = copy.deepcopy(before)
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, QuantisedLinear)]
    for name, part in layers:
        plain.get_submodule(name).weight.data = part.unpack(part.weight, part.scales)
    tokens, logits, gradients = torch.arange(12)[None], [], []
    for each in (model, plain, before):
        entered = each.get_input_embeddings()(tokens).detach().requires_grad_()
        logits.append(each(inputs_embeds=entered, use_cache=False).logits)
        logits[-1].square().sum().backward()
        gradients.append(entered.grad)

    def off(one, other):
        return float((one - other).abs().max().detach() / other.abs().max().detach())

    return {
        "packed": len(layers),
        "off": off(logits[0], logits[1]),
        "as it was": off(logits[0], logits[2]),
        "gradient off": off(gradients[0], gradients[1]),
        "draws": is_undrawn,
        "others": [multiplies(kind) for kind in (type(before.transformer.h[0].mlp.dense_h_to_4h), Scaled, Wider, Two)],
    }


class Scaled(nn.Linear):
    """Another product."""

    def forward(self, value):
        return super().forward(value) * 1.5


class Wider(nn.Linear):
    """It wants more than weight and bias."""

    def forward(self, value):
        return super().forward(value) + self.more


class Two(nn.Linear):
    """Not one tensor."""

    def forward(self, value):
        return super().forward(value), value


def experts():
    """Why a mixture of experts is refused."""
    job = make_job(method="qlora", dropout=0.0)
    try:
        load_model(replace(job, model=replace(job.model, path=mixture_folder())))
    except GanglineError as error:
        return str(error)
    return "it was loaded"


def without_the_library():
    """What is said where bitsandbytes is not installed."""
    sys.modules["bitsandbytes"] = None
    try:
        load_model(make_job(method="qlora"))
    except GanglineError as error:
        return str(error)
    return "it was loaded"

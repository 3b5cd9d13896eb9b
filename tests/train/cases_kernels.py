"""What each test of test_kernels.py computes, in a process of the pool or in one of its own."""

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from gangline.errors import UsageError
from gangline.kernel_table import KERNELS
from gangline.worker import documents
from gangline.worker import loss as loss_module
from gangline.worker.batch import collate
from gangline.worker.borders import borders_of
from gangline.worker.kernels.choice import KernelPlace, put_in_kernels
from gangline.worker.loss import CausalLoss, LinearCrossEntropy
from gangline.worker.precision import agree_precision
from tests.train.cases_loss import tiny
from tests.train.small import VOCABULARY, MemorySet, make_job, make_session, make_world, norms_in_own_dtype, run_loop

LENGTHS = ((5, 1, 9, 3), (18,), (7, 11))


def by_formula(query, key, value, starts, *, scale):
    """Causal attention in each document, one after the other, from softmax(q k) v alone."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    parts = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (each[start:end].transpose(0, 1) for each in (query, key, value))
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append((weights @ v).transpose(0, 1))
    return torch.cat(parts)


def stand_in(words: str, calls: list):
    """torch's attention for sequences of any length with the words of a release, computed by the formula."""

    def check(query, key, cu_seq_q, cu_seq_k, max_q, max_k, *, causal, scale=None, gqa=True):
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype is torch.int32
        assert max_q == max_k == int(cu_seq_q.diff().max())
        assert causal
        assert gqa or query.shape[1] == key.shape[1]
        calls.append(len(cu_seq_q) - 1)
        return query.shape[-1] ** -0.5 if scale is None else scale

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        scale = check(query, key, cu_seq_q, cu_seq_k, max_q, max_k, causal=is_causal)
        return by_formula(query, key, value, cu_seq_q, scale=scale)

    def of_2_11(query, key, value, *borders, return_aux=None, scale=None, window_size=(-1, -1)):
        scale = check(query, key, *borders, causal=window_size == (-1, 0), scale=scale)
        return by_formula(query, key, value, borders[0], scale=scale)

    def of_2_13(query, key, value, *borders, scale=None, window_size=(-1, -1), enable_gqa=False):
        scale = check(query, key, *borders, causal=window_size == (-1, 0), scale=scale, gqa=enable_gqa)
        return by_formula(query, key, value, borders[0], scale=scale)

    function = {"2.10": of_2_10, "2.11": of_2_11, "2.13": of_2_13}[words]
    names = {
        "2.10": {"is_causal", "return_aux"},
        "2.11": {"return_aux", "scale", "window_size"},
        "2.13": {"return_aux", "scale", "window_size", "enable_gqa"},
    }[words]
    return lambda: (function, frozenset(names))


def rows_of(lengths=LENGTHS, *, vocabulary: int = 96, seed: int = 2):
    """A batch of rows with documents of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for row in lengths:
        tokens = torch.randint(vocabulary, (sum(row),), generator=draw).numpy()
        positions = torch.cat([torch.arange(each) for each in row]).numpy()
        rows.append(SimpleNamespace(input_ids=tokens, targets=tokens, position_ids=positions))
    return collate(rows)


def loss_and_gradients(model, batch, *, at_once: bool, compute, checkpointing: bool = False):
    """Of a model that attends inside documents."""
    assert documents.keep_apart(model, length=64, at_once=at_once)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    total = CausalLoss(model, compute=compute)(*batch.tensors)
    total.backward()
    gradients = torch.cat([weight.grad.flatten().double() for weight in model.parameters()])
    model.zero_grad()
    return float(total.detach()), gradients


def at_once_and_one_after_the_other(kind: str, *, words: str, checkpointing: bool = False, **changes):
    """How far all documents in one call are from one call each, with torch's words of a release, in fp64."""
    norms_in_own_dtype()
    model, batch, calls = tiny(kind, dtype=torch.float64, **changes), rows_of(), []
    compute = {"compute": torch.float64, "checkpointing": checkpointing}
    expected, there = loss_and_gradients(model, batch, at_once=False, **compute)
    with (
        patch.object(documents, "_varlen_attention", stand_in(words, calls)),
        patch.object(documents, "SIXTEEN_BITS", (torch.float64,)),
    ):
        total, here = loss_and_gradients(model, batch, at_once=True, **compute)
    return {
        "loss": abs(total / expected - 1),
        "gradients": float((here - there).norm() / there.norm()),
        "calls": calls,
    }


def does_without(**changes):
    """How many calls of it a layer makes that it does not fit, and whether attention is right."""
    attention = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    positions = torch.cat([torch.arange(3), torch.arange(4)])[None]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 16, dtype=torch.bfloat16) for _ in range(3))
    if size := changes.pop("value_size", None):
        value = torch.randn(1, 2, 7, size, dtype=torch.bfloat16)
    dtype = getattr(torch, changes.pop("dtype", "bfloat16"))
    tensors, calls = [each.to(dtype) for each in (query, key, value)], []
    with ExitStack() as stack:
        stack.enter_context(patch.object(documents, "_varlen_attention", stand_in("2.13", calls)))
        found, _ = documents.attend_at_once(attention, *tensors, None, position_ids=positions, **changes)
    expected, _ = documents.attend(attention, *tensors, None, position_ids=positions, **changes)
    return {"calls": len(calls), "same": torch.allclose(found.float(), expected.float(), atol=0.02)}


def under_autocast():
    """The dtype in which weights of fp32 attend under autocast."""
    seen = []

    def watch():
        def attention(query, key, value, *borders, scale=None, window_size=(-1, -1), enable_gqa=False):
            seen.extend([query.dtype, key.dtype, value.dtype])
            return by_formula(query, key, value, borders[0], scale=scale)

        return attention, frozenset({"scale", "window_size", "enable_gqa"})

    model, batch = tiny("llama"), rows_of()
    with patch.object(documents, "_varlen_attention", watch), torch.autocast("cpu", dtype=torch.bfloat16):
        loss_and_gradients(model, batch, at_once=True, compute=torch.bfloat16)
    return sorted({str(each) for each in seen})


def borders_on_another_device():
    """What is known of the borders of a batch whose device cannot be asked: that of tensors without numbers."""
    moved = rows_of().to(torch.device("meta"))
    found = borders_of(moved.position_ids, rows=3)
    return {"lengths": found.lengths, "starts": found.starts.tolist(), "longest": found.longest}


def place_of(job, *, device: str = "cpu", model=None):
    """Where kernels are put in, with a small model unless there is one."""
    where = torch.device(device)
    precision = agree_precision(job, where, world_size=1)
    loss = CausalLoss(tiny("llama") if model is None else model, compute=precision.compute, is_meta=True)
    return KernelPlace(loss=loss, job=job, device=where, precision=precision)


def chosen(kernels: list[str], *, packing: bool = True):
    """What a job takes on a processor, or what it is told."""
    job = make_job(precision="bf16", kernels=tuple(kernels))
    job = replace(job, data=replace(job.data, packing=packing))
    try:
        found = put_in_kernels(place_of(job), world_size=1)
    except UsageError as error:
        return {"said": (error.what, error.seen, error.fix)}
    return {"taken": found.taken, "left": found.left}


def of_a_session(kernels: list[str]):
    """The kernels of a whole session, and how its losses begin."""
    job = make_job(steps=2, kernels=tuple(kernels))
    session = make_session(job, make_world([10], rank=0), num_samples=20)
    _, found = run_loop(session)
    return {"left": session.kernels.left, "losses": [loss for _, loss, _ in found.steps], "names": list(KERNELS)}


def attention_of_a_card(*, heads: int, kv_heads: int, size: int, dtype: str):
    """One call for all documents against a call for each, on a card: outputs and gradients, relative to their norms."""
    device, compute = torch.device("cuda"), getattr(torch, dtype)
    lengths = ((700, 1, 300, 23), (1024,), (64, 960))
    batch = rows_of(lengths).to(device)
    attention = SimpleNamespace(is_causal=True, num_key_value_groups=heads // kv_heads)
    torch.manual_seed(0)
    shapes = ((3, heads, 1024, size), (3, kv_heads, 1024, size), (3, kv_heads, 1024, size))
    leaves = [torch.randn(shape, device=device, dtype=compute, requires_grad=True) for shape in shapes]
    weights = torch.randn(3, 1024, heads, size, device=device, dtype=compute)
    found, calls, own = [], [], documents.varlen

    def counted(*tensors, **options):
        calls.append(1)
        return own(*tensors, **options)

    with patch.object(documents, "varlen", counted):
        for function in (documents.attend, documents.attend_at_once):
            out, _ = function(attention, *leaves, None, position_ids=batch.position_ids, scaling=0.2)
            found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    apart = [float((one - two).float().norm() / one.float().norm()) for one, two in zip(*found, strict=True)]
    return {"apart": apart, "calls": len(calls)}


def of_a_model(kind: str, kernels: list[str], *, device: str):
    """Whether a session's loss is computed in chunks, by a kernel, and what it takes, or what it is told."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config, "phi": transformers.PhiConfig}
    with tempfile.TemporaryDirectory() as folder:
        config[kind](**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0).save_pretrained(folder)
        job = make_job(precision="fp32", dropout=0.0, kernels=tuple(kernels))
        job = replace(job, model=replace(job.model, path=folder))
        try:
            session = make_session(job, make_world([10], rank=0, device=device))
        except UsageError as error:
            return {"what": error.what, "seen": error.seen}
    taken = "cross-entropy" in session.kernels.taken
    return {"in_chunks": session.loss.fused, "by_kernel": session.loss.rows_loss is not None, "taken": taken}


def without_triton(folder: str):
    """What is left out where the package triton cannot be imported."""
    Path(folder, "triton").mkdir()
    Path(folder, "triton", "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    others = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] != "triton" and name not in {each.place for each in KERNELS.values()}
    }
    with patch.dict(sys.modules, others, clear=True), patch.object(sys, "path", [folder, *sys.path]):
        return chosen(["auto"])["left"]


def steps_of_a_card(kernels: list[str], *, precision: str = "bf16", method: str = "full", **changes):
    """Losses of packed rows on a card, the kernels, and whether a step's attention waits for the card."""
    job = make_job(method=method, precision=precision, steps=8, dropout=0.0, kernels=tuple(kernels), **changes)
    job = replace(job, data=replace(job.data, packing=True, sequence_length=64))
    session = make_session(job, make_world([10], rank=0, device="cuda"), packed=True)
    _, found = run_loop(session)
    return {
        "losses": [loss for _, loss, _ in found.steps],
        "taken": session.kernels.taken,
        "left": session.kernels.left,
    }


def attention_without_waiting():
    """Forward and backward of packed rows on a card where every wait for it is an error."""
    device = torch.device("cuda")
    model = tiny("llama", dtype=torch.bfloat16).to(device)
    batch = collate([MemorySet(4, seed=3, packed=True).sample(index) for index in range(4)])
    loss_and_gradients(model, batch.to(device), at_once=True, compute=torch.bfloat16)
    loss = CausalLoss(model, compute=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to(device)
        loss(*moved.tensors).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return bool(torch.isfinite(next(model.parameters()).grad).all())


def dense_attention_of(kind: str):
    """Whether rows of one document keep torch's plain attention, which has faster kernels for them."""
    calls, plain, own = [], [], F.scaled_dot_product_attention

    def watched(*tensors, **options):
        plain.append(1)
        return own(*tensors, **options)

    model = tiny(kind, dtype=torch.float64)
    with (
        patch.object(documents, "_varlen_attention", stand_in("2.13", calls)),
        patch.object(documents, "SIXTEEN_BITS", (torch.float64,)),
        patch.object(F, "scaled_dot_product_attention", watched),
    ):
        loss_and_gradients(model, rows_of(((9,), (9,))), at_once=True, compute=torch.float64)
    return {"calls": len(calls), "plain": bool(plain)}


def apart(found, expected) -> float:
    """The norm of the difference over the norm, at worst, of tensors one by one."""
    return max(
        float((one.double() - two.double()).norm() / two.double().norm())
        for one, two in zip(found, expected, strict=True)
    )


def drawn(*shapes, dtype: str, device: str):
    """Tensors with gradients."""
    draw = torch.Generator().manual_seed(5)
    made = (torch.randn(shape, generator=draw).to(device, getattr(torch, dtype)) for shape in shapes)
    return [each.requires_grad_() for each in made]


def norms(*, device: str, dtype: str, kind: str, rows: int, n: int, wide_weight: bool = False, trains: bool = True):
    """A norm by the kernel and by transformers: how far output and gradients are apart, and what form it was."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    from gangline.worker.kernels import rms_norm

    own = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "olmo2": Olmo2RMSNorm}[kind](n).to(device)
    x, weight = drawn((rows, 3, n), (n,), dtype=dtype, device=device)
    weight = nn.Parameter(weight.detach().float() if wide_weight else weight.detach(), requires_grad=trains)
    own.weight = weight
    weights = torch.randn(rows, 3, n, device=device)
    leaves = [x, weight] if trains else [x]
    found, put_in = [], []
    for _ in range(2):
        out = own(x)
        found.append([out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)])
        job = make_job(precision="bf16" if wide_weight else "fp32")
        put_in.append(len(rms_norm.put_in(place_of(job, device=device, model=own))))
    return {"apart": apart(found[1], found[0]), "number": put_in[0], "dtypes": found[0][0].dtype == found[1][0].dtype}


def gated(*, device: str, dtype: str, act: str):
    """A feed-forward layer by the kernel and by transformers."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    from gangline.worker.kernels import gated_mlp

    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=72, hidden_act=act)
    torch.manual_seed(0)
    layer = LlamaMLP(config).to(device, getattr(torch, dtype))
    [x] = drawn((3, 11, 32), dtype=dtype, device=device)
    weights = torch.randn(3, 11, 32, device=device)
    found, put_in = [], []
    for _ in range(2):
        out = layer(x)
        leaves = [x, *layer.parameters()]
        found.append([out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)])
        precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        put_in.append(len(gated_mlp.put_in(place_of(make_job(precision=precision), device=device, model=layer))))
    return {"apart": apart(found[1], found[0]), "number": put_in[0]}


def rotated(*, device: str, dtype: str, rows: int):
    """Queries and keys turned by the kernel and by transformers, as views of what linears make."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from gangline.worker.kernels import rotary_embedding

    leaves = drawn((2, 7, 6, 24), (2, 7, 3, 24), dtype=dtype, device=device)
    query, key = (each.transpose(1, 2) for each in leaves)
    cos, sin = (torch.randn(rows, 7, 24, device=device).to(getattr(torch, dtype)) for _ in range(2))
    weights = torch.randn(2, 9, 7, 24, device=device)
    found = []
    for function in (apply_rotary_pos_emb, rotary_embedding.rotate):
        out = torch.cat(function(query, key, cos, sin), dim=1)
        found.append([out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)])
    return {"apart": apart(found[1], found[0])}


def losses_of_rows(*, device: str, dtype: str, vocabulary: int):
    """Loss and gradients of the output head with the kernel and with torch's operators, in chunks of 64 rows."""
    from gangline.worker.kernels import cross_entropy

    compute = getattr(torch, dtype)
    hidden, weight = drawn((150, 16), (vocabulary, 16), dtype="float32", device=device)
    hidden = (hidden.detach() * 3).to(compute).requires_grad_()
    goal = torch.randint(vocabulary, (150,), device=device)
    found = []
    with patch.dict(loss_module.CHUNK_NUMBERS, {device: 64 * vocabulary}):
        for kernel in (None, cross_entropy.cross_entropy_in_place):
            total = LinearCrossEntropy.apply(hidden, weight, None, goal, compute, True, kernel)
            found.append([total.detach(), *torch.autograd.grad(total * 0.5, [hidden, weight])])
        alone = LinearCrossEntropy.apply(hidden.detach(), weight.detach(), None, goal, compute, True, kernel)
    return {"apart": apart(found[1], found[0]), "alone": apart([alone], found[0][:1])}


class Behind(nn.Module):
    """A linear in another class."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


def adapters(*, device: str, precision: str, autocast: bool, quantised: bool = False):
    """A linear with an adapter, with its addition in the product and as peft computes it."""
    import peft

    from gangline.worker.kernels import lora

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24, bias=False))
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=["0", "1"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).to(device)
    if precision == "bf16":
        for name, weight in model.named_parameters():
            weight.data = weight.data if autocast and "lora" in name else weight.data.bfloat16()
    if precision == "fp64":
        model.double()
    if quantised:  # what stands for a linear with few bits: no nn.Linear, and its own forward
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                module.base_layer = Behind(module.base_layer)
    [x] = drawn((3, 11, 24), dtype=str(next(model.parameters()).dtype)[6:], device=device)
    trained = [weight for name, weight in model.named_parameters() if "lora" in name]
    weights, found, put_in = torch.randn(3, 11, 24, device=device), [], []
    place = place_of(make_job(method="lora", dropout=0.0, precision=precision), device=device, model=model)
    assert not lora.obstacle(place)
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            out = model(x)
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *trained])])
        put_in.append(len(lora.put_in(place)))
    with model.disable_adapter():
        plain = model(x.to(next(model.parameters()).dtype))
        off = torch.equal(plain, base[1].base_layer(base[0].base_layer(x.to(next(model.parameters()).dtype))))
    return {"apart": apart(found[1], found[0]), "number": put_in[0], "off": off}


def adapters_elsewhere():
    """The output of a model whose active adapter lies in one of its layers, as peft computes it and in place."""
    import peft

    from gangline.worker.kernels import lora

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "1"], init_lora_weights=False))
    model.add_adapter("other", peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    model.set_adapter("other")
    x = torch.randn(3, 24)
    expected = model(x).detach()
    put_in = lora.put_in(place_of(make_job(method="lora", dropout=0.0, precision="fp32"), model=model))
    return {"apart": apart([model(x).detach()], [expected]), "number": len(put_in)}


def timed_steps():
    """What a side of a benchmark is given in each of its steps, where it writes over its inputs and their gradients."""
    from benchmarks.kernels import there_and_back

    seen = []

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x.tolist())
            made = x.clone()
            x.data.zero_()
            return made

        @staticmethod
        def backward(ctx, dy):
            seen.append(dy.tolist())
            dy.data.zero_()
            return dy

    begin = there_and_back(Writes.apply, [torch.randn(3, requires_grad=True)])
    seen.clear()
    for _ in range(2):
        begin()()
    return seen


def in_models(*, device: str, kind: str, precision: str, autocast: bool = False, **changes):
    """Loss and gradients of a small model by torch's operators, and with all that `auto` takes, packed rows."""
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = tiny(kind, dtype=torch.float32 if autocast else compute, **changes).to(device)
    loss, batch, found = CausalLoss(model, compute=compute), rows_of().to(torch.device(device)), []
    job, kernels = make_job(precision=precision, kernels=("auto",)), None
    for _ in range(2):
        with torch.autocast(device, dtype=compute, enabled=autocast):
            total = loss(*batch.tensors)
        total.backward()
        gradients = torch.cat([weight.grad.flatten().double() for weight in model.parameters()])
        found.append([total.detach(), gradients])
        model.zero_grad()
        kernels = kernels or put_in_kernels(replace(place_of(job, device=device), loss=loss), world_size=1)
    loss_apart, gradients_apart = (apart([one], [two]) for one, two in zip(*found, strict=True))
    return {"loss": loss_apart, "gradients": gradients_apart, "taken": kernels.taken, "left": kernels.left}


def that_fail(*, device: str, error: str):
    """What becomes of a kernel that cannot be compiled, or computes other numbers: kernels, losses before and after."""
    from gangline.worker.kernels import gated_mlp

    def broken(*tensors, gelu=None, **options):
        if error:
            raise LookupError(error)
        return tensors[0] * 3

    model, batch = tiny("llama"), rows_of()
    loss = CausalLoss(model, compute=torch.float32)
    before = float(loss(*batch.tensors).detach())
    job = make_job(precision="fp32", kernels=("auto",))
    with patch.object(gated_mlp, "_product", broken):
        kernels = put_in_kernels(replace(place_of(job, device=device), loss=loss), world_size=1)
    return {
        "left": kernels.left,
        "taken": list(kernels.taken),
        "losses": [before, float(loss(*batch.tensors).detach())],
    }


def compiled_for(architecture: int):
    """Bytes of the machine code of every program of Triton, for NVIDIA cards that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gangline.worker.kernels import cross_entropy, gated_mlp, rms_norm, rotary_embedding

    numbers, wide = "*bf16", "*fp32"
    norm = {"x_ptr": numbers, "w_ptr": wide, "rms_ptr": wide, "rows": "i32", "n": "i32"}
    pair = {"a_ptr": numbers, "b_ptr": numbers, "count": "i32"}
    strides = ["length", "heads", "half", "x_row", "x_head", "x_token", "y_row", "y_head", "y_token", "cos_row"]
    angles = {
        "x_ptr": numbers,
        "y_ptr": numbers,
        "cos_ptr": numbers,
        "sin_ptr": numbers,
        **dict.fromkeys(strides, "i32"),
    }
    early = {"OFFSET": 0.0, "EARLY": True, "ROWS": 16, "BLOCK": 128}
    programs = [
        (rms_norm._forward, {**norm, "y_ptr": wide, "eps": "fp32"}, early),
        (
            rms_norm._backward,
            {**norm, "dy_ptr": wide, "dx_ptr": numbers, "dw_ptr": wide, "tiles": "i32"},
            {**early, "WEIGHT": True},
        ),
        (gated_mlp._forward, {**pair, "c_ptr": numbers}, {"GELU": True, "BLOCK": 2048}),
        (
            gated_mlp._backward,
            {**pair, "dc_ptr": numbers, "da_ptr": numbers, "db_ptr": numbers},
            {"GELU": True, "BLOCK": 2048},
        ),
        (rotary_embedding._turn, angles, {"BACK": True, "HEADS": 32, "HALF": 64}),
        (
            cross_entropy._rows,
            {"x_ptr": numbers, "goal_ptr": "*i64", "loss_ptr": wide, "n": "i32"},
            {"GRADIENT": True, "BLOCK": 8192},
        ),
    ]
    found = {}
    for program, types, fixed in programs:
        signature = {name: types.get(name, "constexpr") for name in program.arg_names}
        source = ASTSource(fn=program, signature=signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        found[f"{program.__module__.rpartition('.')[2]}.{program.__name__}"] = len(made.asm["cubin"])
    return found


def adapters_of_a_run(*, of_method=None, **changes):
    """How far runs with the kernel for adapters are from those with peft's layers, losses and norms, and its places.

    of_method: changes of `Job.method`; changes: those of the job.
    """
    norms_in_own_dtype()
    job = make_job(**{"method": "lora", "steps": 6, **changes})
    job = replace(job, method=replace(job.method, **(of_method or {})))
    found = []
    for name in ("torch", "auto"):
        session = make_session(replace(job, kernels=(name,)), make_world([10], rank=0))
        _, captured = run_loop(session)
        found.append([figure for _, *figures in captured.steps for figure in figures])
    apart = [abs(here / there - 1) for here, there in zip(*found, strict=True)]
    return {"apart": max(apart), "places": session.kernels.taken}

"""What a rank does in test_loss: losses and their gradients, computed in more than one way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from gangline.worker.batch import collate
from gangline.worker.borders import borders_of
from gangline.worker.data import TokenSet
from gangline.worker.documents import keep_apart
from gangline.worker.loss import CausalLoss, LinearCrossEntropy, sees_other_documents
from tests.train.small import MemorySet, norms_in_own_dtype


def tiny(kind: str, *, dtype=torch.float32, **changes):
    """A small random model of some family."""
    import transformers

    common = {"vocab_size": 96, **changes}
    configs = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **common
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0, **common
        ),
        "gemma2": lambda: transformers.Gemma2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            **common,
        ),
        "mamba": lambda: transformers.MambaConfig(
            hidden_size=32, num_hidden_layers=2, state_size=4, intermediate_size=64, time_step_rank=4, **common
        ),
    }
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(configs[kind](), dtype=dtype).eval()


def against_torch(*, bias: bool, tied: bool):
    """Largest differences of loss and gradients between the chunked head and torch's own cross-entropy."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30_000 if tied else 500, 16, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(weight.shape[0], dtype=torch.float64, requires_grad=True) if bias else None
    goal = torch.randint(0, weight.shape[0], (300,))
    leaves = [hidden, weight] + ([offset] if bias else [])
    ours = LinearCrossEntropy.apply(hidden, weight, offset, goal, torch.float64, True)
    gradients = torch.autograd.grad(3 * ours, leaves)
    expected = F.cross_entropy(F.linear(hidden, weight, offset), goal, reduction="sum")
    wanted = torch.autograd.grad(3 * expected, leaves)
    return {
        "loss": abs((ours / expected).item() - 1),
        "gradients": [float((g - w).norm() / w.norm()) for g, w in zip(gradients, wanted, strict=True)],
    }


def fused_and_plain(kind: str):
    """Loss by the path that CausalLoss chose, and by the model's own logits."""
    model = tiny(kind)
    loss = CausalLoss(model, compute=torch.float32)
    batch = collate([MemorySet(3).sample(index) for index in range(3)])
    chosen = float(loss(*batch.tensors).detach())
    was_fused, loss.fused = loss.fused, False
    return {"fused": was_fused, "chosen": chosen, "plain": float(loss(*batch.tensors).detach())}


def packed_and_apart(kind: str, *, attention: str | None = None):
    """Summed loss of five documents packed in one sample (beside a padded one), and of each alone."""
    norms_in_own_dtype()
    model = tiny(kind, dtype=torch.float64)
    if attention:
        model.set_attn_implementation(attention)
    documents = [MemorySet(5, seed=4).sample(index) for index in range(5)]
    loss = CausalLoss(model, compute=torch.float64)
    packed = SimpleNamespace(
        input_ids=np.concatenate([one.input_ids for one in documents]),
        targets=np.concatenate([one.targets for one in documents]),
        position_ids=np.concatenate([one.position_ids for one in documents]),
    )
    together = float(loss(*collate([packed, documents[0]]).tensors).detach())
    apart = sum(float(loss(*collate([one]).tensors).detach()) for one in [*documents, documents[0]])
    return {"packed": together, "apart": apart, "leaks": sees_other_documents(loss)}


def inside_documents(kind: str, **changes):
    """Loss and gradients of a sample of five documents and of a padded one: by transformers' mask, and without; with the
    masks that torch's attention got without, and whether it is done in the model at all.
    """
    norms_in_own_dtype()
    model = tiny(kind, dtype=torch.float64, **changes)
    documents = [MemorySet(5, seed=4).sample(index) for index in range(5)]
    packed = SimpleNamespace(
        **{
            key: np.concatenate([getattr(one, key) for one in documents])
            for key in ("input_ids", "targets", "position_ids")
        }
    )
    batch = collate([packed, documents[0]])
    loss, found, masks = CausalLoss(model, compute=torch.float64), [], []
    own = F.scaled_dot_product_attention

    def watched(*tensors, attn_mask=None, **options):
        masks.append(attn_mask is not None)
        return own(*tensors, attn_mask=attn_mask, **options)

    for apart in (False, True):
        taken = keep_apart(model, length=128) if apart else False
        masks.clear()
        with patch.object(F, "scaled_dot_product_attention", watched):
            total = loss(*batch.tensors)
        total.backward()
        found.append((total.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
        model.zero_grad()
    (with_mask, there), (without, here) = found
    return {
        "taken": taken,
        "loss": abs((without / with_mask).item() - 1),
        "gradients": float((here - there).norm() / there.norm()),
        "masks": sum(masks),
        "calls": len(masks),
        "leaks": sees_other_documents(loss),
    }


def document_lengths(rows: list[list[int]]):
    """What the borders of documents are found to be."""
    return borders_of(torch.tensor(rows), rows=len(rows)).lengths


def of_token_sets(folders: list[str], *, vocab_size: int):
    """How far two sets of tokens are apart: in the summed loss of all samples, and in its gradients."""
    norms_in_own_dtype()
    model = tiny("llama", dtype=torch.float64, vocab_size=vocab_size)
    loss, found = CausalLoss(model, compute=torch.float64), []
    for folder in folders:
        tokens = TokenSet.open(Path(folder))
        model.zero_grad()
        total = loss(*collate([tokens.sample(index) for index in range(len(tokens))]).tensors)
        total.backward()
        gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found.append((float(total.detach()), gradients))
    (apart, there), (packed, here) = found
    return {"loss": abs(packed / apart - 1), "gradients": float((here - there).norm() / there.norm())}

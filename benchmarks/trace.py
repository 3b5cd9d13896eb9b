"""Traces against what torch's profiler saw, and what a trace of a large model costs.

    python -m benchmarks.trace --out trace.jsonl

Appends one JSON line per case (with the commit); cases that the file has already are passed over, so that a run can be
continued. The last lines printed are tables for RESULTS.md. No GPU; about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.train import cases_trace
from tests.train.pool import ROOT, Zygote
from tests.train.test_trace import SMALL

GIB = 1 << 30
EXPERTS = {
    **SMALL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
LATENT = {
    **SMALL,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
LORA = {"kind": "lora", "rank": 8}
REAL: dict[str, dict[str, Any]] = {
    "full": {},
    "full, checkpointed": {"activation_checkpointing": True},
    "full, packed": {"packing": True},
    "full, packed, checkpointed": {"packing": True, "activation_checkpointing": True},
    "full, tied head": {"config": {**SMALL, "tie_word_embeddings": True}},
    "full, eager attention": {"attention": "eager"},
    "full, plain kernel": {"attention_kernel": "math"},
    "full, 2 micro-batches": {"micro_batches": 2},
    "full, mixed bf16": {"precision": "bf16"},
    "full, mixed bf16, checkpointed": {"precision": "bf16", "activation_checkpointing": True},
    "full, pure bf16": {"precision": "bf16", "parameters": "compute"},
    "full, pure bf16, plain kernel": {"precision": "bf16", "parameters": "compute", "attention_kernel": "math"},
    "LoRA": {"method": LORA},
    "LoRA, dropout": {"method": {**LORA, "dropout": 0.1}},
    "LoRA, checkpointed": {"method": LORA, "activation_checkpointing": True},
    "LoRA, packed": {"method": LORA, "packing": True},
    "LoRA, packed, checkpointed": {"method": LORA, "packing": True, "activation_checkpointing": True},
    "LoRA, bf16": {"method": LORA, "precision": "bf16"},
    "LoRA, fp16 with a scale": {"method": LORA, "precision": "fp16"},
    "fused experts": {"config": EXPERTS},
    "fused experts, LoRA, checkpointed": {"config": EXPERTS, "method": LORA, "activation_checkpointing": True},
    "latent attention": {"config": LATENT},
    "capped logits (Gemma 2)": {"config": {**SMALL, "model_type": "gemma2", "head_dim": 64}},
    "2 ranks, full": {"ranks": 2},
    "2 ranks, full, 2 micro-batches": {"ranks": 2, "micro_batches": 2},
    "2 ranks, LoRA, checkpointed": {"ranks": 2, "method": LORA, "activation_checkpointing": True},
}
"""Cases that are run for real, too: changes to a step of 2 x 256 tokens in fp32 with exact bytes."""


CONFIGS = ROOT / "tests" / "fixtures" / "planning" / "configs"
BIG_LORA = {"kind": "lora", "rank": 16}
QUERY_VALUE = {**BIG_LORA, "targets": ["q_proj", "v_proj"]}
ATTENTION = {**BIG_LORA, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ADAPTED = {"method": BIG_LORA, "activation_checkpointing": True}
LARGE: dict[str, dict[str, Any]] = {
    "Llama-2-7B, LoRA, checkpointed": ADAPTED,
    "Llama-2-13B, LoRA, checkpointed": {**ADAPTED, "config": "llama-2-13b"},
    "Llama-2-70B, LoRA, checkpointed": {**ADAPTED, "config": "llama-2-70b"},
    "Llama-3-8B, LoRA, checkpointed": {**ADAPTED, "config": "llama-3-8b"},
    "Qwen2.5-7B, LoRA, checkpointed": {**ADAPTED, "config": "qwen2.5-7b"},
    "Gemma-2-9B, LoRA, checkpointed": {**ADAPTED, "config": "gemma-2-9b"},
    "GLM-4.5-Air, LoRA on attention, checkpointed": {**ADAPTED, "config": "glm-4.5-air", "method": ATTENTION},
    "GLM-4.5-Air, LoRA, checkpointed": {**ADAPTED, "config": "glm-4.5-air"},
    "Llama-2-7B, LoRA q,v, checkpointed": {"method": QUERY_VALUE, "activation_checkpointing": True},
    "Llama-2-7B, LoRA q,v": {"method": QUERY_VALUE},
    "Llama-2-7B, LoRA q,v, plain kernel": {"method": QUERY_VALUE, "attention_kernel": "math"},
    "Llama-2-7B, full, pure bf16, checkpointed": {"parameters": "compute", "activation_checkpointing": True},
    "Llama-2-7B, full, pure bf16": {"parameters": "compute"},
    "Llama-2-7B, full, fp32 weights, checkpointed": {"activation_checkpointing": True},
    "Llama-2-7B, full, fp32 weights, checkpointed, 2 ranks, 2 micro-batches": {
        "activation_checkpointing": True,
        "ranks": 2,
        "micro_batches": 2,
    },
}
"""Changes to a step of 1 x 2048 tokens of Llama-2-7B in bf16, with the kernels of a recent NVIDIA card."""


def main() -> None:
    """Do every case that the file does not have, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = {(line["suite"], line["case"]) for line in _read(arguments.out)}
    zygote = Zygote()
    try:
        for suite, name, measure in _cases(zygote):
            if (suite, name) in done:
                continue
            line = {"suite": suite, "case": name, **measure(), "commit": _commit()}
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    finally:
        zygote.close()
    _print_tables(_read(arguments.out))


def _cases(zygote: Zygote) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    for name, changes in REAL.items():
        yield "real", name, lambda changes=changes: _compare(zygote, changes)
    for name, changes in LARGE.items():
        yield "large", name, lambda changes=changes: _large(changes)


def _compare(zygote: Zygote, changes: dict[str, Any]) -> dict[str, Any]:
    """The peak by the profiler over every rank, and by the trace."""
    order = {
        "config": SMALL,
        "precision": "fp32",
        "micro_batch": 2,
        "sequence_length": 256,
        "attention_kernel": "cpu",
        "rounding_bytes": 1,
        **changes,
    }
    real = zygote.pool(order.get("ranks", 1)).run(cases_trace.profiled_peak, order=order, timeout_s=300)
    traced = zygote.pool(1).run(cases_trace.traced_peak, order=order, timeout_s=300)[0]
    return {"real_bytes": max(real), "traced_bytes": traced}


def _large(changes: dict[str, Any]) -> dict[str, Any]:
    """A trace by the program itself: its time from start to end, its processor time and its memory."""
    order = {"config": "llama-2-7b", "precision": "bf16", "sequence_length": 2048, **changes}
    order["config"] = json.loads((CONFIGS / f"{order['config']}.json").read_text(encoding="utf-8"))
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as stream, tempfile.TemporaryFile("w+") as answers:
        stream.write(json.dumps(order))
        stream.seek(0)
        process = subprocess.Popen([sys.executable, "-m", "gangline.worker.trace"], stdin=stream, stdout=answers)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begun
        answers.seek(0)
        answer = json.load(answers)
    if status:
        raise SystemExit(json.dumps(answer))
    kept = ("peak_bytes", "peak_instant", "instants", "layers", "weights_bytes", "gradients_bytes", "optimizer_bytes")
    return {
        **{name: answer[name] for name in (*kept, "num_parameters", "num_trainable", "notes", "versions")},
        "token_bytes": round(_token_bytes(answer) / order["sequence_length"], 1),
        "depths": [depth["layers"] for depth in answer["depths"]],
        "seconds": round(seconds, 2),
        "processor_s": round(used.ru_utime + used.ru_stime, 2),
        "resident_bytes": used.ru_maxrss * 1024,
    }


def _token_bytes(answer: dict[str, Any]) -> float:
    """What one more layer keeps for its backward pass, over all tokens of the micro-batch."""
    shallow, deep = answer["depths"][-2:]
    held = sum(deep[name] - shallow[name] for name in ("weights_bytes", "optimizer_bytes"))
    return float(answer["per_layer_bytes"]["forward"]) - held / (deep["layers"] - shallow["layers"])


def _print_tables(lines: list[dict[str, Any]]) -> None:
    print("\n| a real step on the CPU | profiler, bytes | traced | difference |\n|---|---|---|---|")
    for line in (line for line in lines if line["suite"] == "real"):
        off = line["traced_bytes"] / line["real_bytes"] - 1
        print(f"| {line['case']} | {line['real_bytes']:,} | {line['traced_bytes']:,} | {off:+.2%} |")
    print("\n| 1 x 2048 tokens, bf16 | peak, GiB | at | persistent, GiB | kept per layer and token | s | processor s |")
    print("|---|---|---|---|---|---|---|")
    for line in (line for line in lines if line["suite"] == "large"):
        held = sum(line[name] for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"))
        # with fp32 weights each layer also adds autocast's bf16 copies of them, which have nothing to do with tokens
        kept = "" if "fp32 weights" in line["case"] else f"{line['token_bytes']:,.0f} B"
        print(
            f"| {line['case']} | {line['peak_bytes'] / GIB:.2f} | {line['peak_instant']} | {held / GIB:.2f} "
            f"| {kept} | {line['seconds']:.0f} | {line['processor_s']:.1f} |"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()

"""Models that no closed form knows: built without weights by a worker process, and counted there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, ModelError
from gangline.planning.architecture import Architecture, Layer, Linear
from gangline.remote.local import LocalTransport
from gangline.runs.cluster import Host
from gangline.runs.files import read_json, write_json
from gangline.steps.seams import Means
from gangline.steps.shape import config_digest

LIMIT_S = 120.0
"""Building a model without weights takes seconds, a trace half a minute on a slow machine."""
_ATTENTION = ("q", "k", "v", "o", "qkv", "attn", "query", "key", "value", "wqkv", "out")
"""Beginnings of names of the matrices around attention."""


def ask_trace(order: Mapping[str, Any] | list[dict[str, Any]], *words: str, means: Means) -> Any:
    """What `python -m gangline.worker.trace` answers on this computer, where torch has to be.

    Raises ModelError where there is none, and the worker's own error.
    """
    host = Host(name="this computer", workdir=str(means.home), python=sys.executable)
    argv = host.argv("-m", "gangline.worker.trace", *words)
    env = {**host.code_env, "OMP_NUM_THREADS": "1"}
    try:
        result = LocalTransport(host).run(argv, stdin=json.dumps(order).encode(), env=env, timeout_s=LIMIT_S)
    except TimeoutError as error:
        fix = "try again while less runs on this computer"
        raise ModelError("the model cannot be built in time", seen=str(error), fix=fix) from error
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        raise ModelError(
            "the model cannot be built on this computer",
            seen=(result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1],
            fix="install what the trainer needs beside gangline: pip install 'gangline[train]'",
        ) from None
    first = answer if isinstance(answer, dict) else next((one for one in answer if one.get("kind") == "error"), {})
    if first.get("kind") == "error":
        raise GanglineError.from_json({**first, "kind": first.get("error_kind")})
    return answer


def count_architecture(config: Mapping[str, Any], means: Means) -> Architecture:
    """The shape of a model of any kind that transformers knows; kept by the content of its configuration.

    Raises ModelError where it cannot be built, or where its layers are not of one shape.
    """
    kept = means.home / "models" / f"{config_digest(config)}.json"
    try:
        record = read_json(kept)
    except (OSError, ValueError):
        means.talk.tick("counting the model's parameters")
        try:
            record = ask_trace({"config": dict(config)}, "count", means=means)
        except ModelError:
            raise
        except GanglineError as error:  # of the worker's own: it would be the same the next time
            record = {**error.to_json(), "kind": "error"}
        _keep(kept, record)
    if record.get("kind") == "error":
        raise ModelError(str(record.get("what", "")), seen=str(record.get("seen", "")), fix=str(record.get("fix", "")))
    try:
        return counted(config, record)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"config.json has no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"no closed form holds for models of the kind {config.get('model_type')}",
            seen=missing,
            fix="plan with a model of the same size of a kind that is known",
        ) from error


def _keep(path: Path, record: Any) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, record)


def counted(config: Mapping[str, Any], record: Mapping[str, Any]) -> Architecture:
    """The architecture that was counted; raises KeyError or ValueError where it does not say enough."""
    text = config.get("text_config") or config
    depth = int(record["layers"])
    linears = tuple(_linear(shape, depth) for shape in record["shapes"])
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    inside = sum(linear.num_weights for linear in linears) * depth
    biases = sum(linear.num_biases for linear in linears) * depth
    experts = int(record["experts"])
    top_k = int(text.get("num_experts_per_tok") or 0)
    num_experts = int(text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0)
    if inside != record["linears"] or experts % depth:
        raise ValueError("matrices or experts do not divide by the number of layers")
    layer = Layer(
        count=depth,
        linears=linears,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        value_dim=head_dim,
        width=int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden) * max(1, top_k),
        experts=num_experts,
        top_k=top_k,
        fused_weights=experts // depth,
        fused_active=experts // depth * top_k // num_experts if num_experts else experts // depth,
    )
    vocabulary = int(text["vocab_size"])
    return Architecture(
        model_type=str(config.get("model_type", "model")),
        hidden=hidden,
        vocabulary=vocabulary,
        tied=bool(record["tied"]),
        layers=(layer,),
        extra_embeddings=max(0, int(record["embeddings"]) - hidden * vocabulary),
        vectors=max(0, int(record["others"]) - biases),
        source="counted",
    )


def _linear(shape: Mapping[str, Any], depth: int) -> Linear:
    if int(shape["count"]) % depth:
        raise ValueError(f"{shape['count']} matrices called {shape['name']} in {depth} layers")
    name = str(shape["name"])
    return Linear(
        name=name,
        inputs=int(shape["columns"]),
        outputs=int(shape["rows"]),
        part="attention" if name.lower().split("_")[0] in _ATTENTION else "mlp",
        bias=bool(shape["bias"]),
        number=int(shape["count"]) // depth,
    )

"""What the ranks do in test_calibrate."""

import contextlib
import io
import json
import os
import time
import types

import torch
import torch.distributed as dist

from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
from gangline.worker import calibrate
from gangline.worker.pace import SLOWDOWN

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def order(method: str = "lora", **more):
    job = Job(
        name="tiny",
        model=ModelJob(path="/nowhere"),
        data=DataJob(train=SourceJob(files=("none.txt",))),
        batch=4,
        micro_batch=2,
        method=MethodJob(kind=method, rank=4),
    )
    common = {"job": job.to_json(), "config": CONFIG, "layers": 2, "points": [[1, 16], [2, 64]], "seconds": 4.0}
    return {**common, "by_module": False, **more}


def lines(method: str = "lora", free: int | None = None, **more):
    """The lines that this rank writes."""
    if free is not None:
        calibrate.free_bytes = lambda _: free
    torch.set_num_threads(1)
    ask = order(method, **more)
    copy = calibrate.build(ask, torch.device("cpu"))
    with contextlib.redirect_stdout(io.StringIO()) as text:
        calibrate.run(ask, copy)
    return [json.loads(line) for line in text.getvalue().splitlines()]


def depths():
    """Layers that run in each of the copies, and in the whole afterwards."""
    copy = calibrate.build(order("full"), torch.device("cpu"))
    stack = copy.core.base_model.layers
    found = []
    for layers in (2, 1):
        with calibrate.shallow(copy, layers) as done:
            found.append([done, len(stack)])
    return [*found, len(stack)]


def adapted_at_once(by_module: bool):
    """Linears of the copy that the kernel `lora` computes."""
    ask = order(by_module=by_module)
    ask["job"]["kernels"] = ["auto"]
    copy = calibrate.build(ask, torch.device("cpu"))
    return sum("forward" in vars(module) for module in copy.loss.model.modules())


def slowed(slowdowns):
    """Seconds that this rank reported and slept, where every micro-batch takes 10 and 20 ms."""
    slept = []
    os.environ[SLOWDOWN] = str(slowdowns[dist.get_rank()])
    calibrate._once = lambda *_: (0.01, 0.02)
    calibrate.time = types.SimpleNamespace(monotonic=time.monotonic, perf_counter=time.perf_counter, sleep=slept.append)
    points = [line for line in lines() if line["kind"] == "point"]
    return [points[0]["seconds"], sorted({round(each, 6) for each in slept})]

"""What memory a rank needs while it loads a model that no rank holds: its part, one layer, and a constant?

    python -m benchmarks.load_memory --out load_memory.jsonl           # 5 GB of disk beside the file, about 30 minutes

A Llama of 1.16 B random weights in fp32 (4.6 GB in 21 files) is loaded by three ranks on this machine, as a run loads
it (`worker/session.py`), over gloo. Another process reads each rank's RssAnon every 5 ms: what the kernel could not
take back, so mapped files do not count. Before the model is loaded everything is imported and the group has met.

Bar: peak - before <= the rank's part of what is kept (weights; under full fine-tuning also AdamW's two states, and
under zero-3 gradients and the weights once more, as they are updated) + one layer + 64 MiB, until every rank has its
part. Then, without a bar, a few tokens go through the model, to see how its loss is computed, for which tables and head
come together as in every step. Beside it the same model under ddp, which every rank holds whole.

Then every case but ddp once more, where there are control groups: each rank is in one of its own, whose limit is that
bar above the anonymous memory at the start, until the rank has its part. Pages of files count there as well (those of
the model are dropped before, so that ranks read them anew) and can be taken back; a rank that wanted more for itself
than the bar would be killed by the kernel, and is tried once more with 64 MiB on top. Without swap that is the peak
of the control group, enforced.

One JSON line per rank and case; a file that has lines already is continued.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab import limits

NUM_RANKS = 3
LAYERS = 20
CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CONSTANT_BYTES = 64 << 20
MORE_BYTES = 64 << 20
"""What is given besides where the kernel, which counts page tables and sockets as well, kills a rank at its bar."""
LOOK_S = 0.005
LOADED = "loaded\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to load it."""

    strategy: str
    method: str
    layers: int = LAYERS
    """Of which the model has so many."""
    limited: bool = False
    """Whether the kernel enforces the bar."""


CASES = (
    *(Case("fsdp", method) for method in ("lora", "full", "qlora")),
    *(Case("pipeline", method) for method in ("lora", "full", "qlora")),
    Case("zero-3", "lora"),
    Case("zero-3", "full", layers=10),  # 20 bytes of each weight, all there from the start: 23 GB with all layers
    Case("ddp", "lora"),
)
LIMITED = tuple(replace(case, limited=True) for case in CASES if case.strategy != "ddp")
STAGES = (6, 8, 6)
"""Layers of each rank in a pipeline."""


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        return _rank(json.loads(words.rank))
    model = words.out.with_name(f"{words.out.stem}-model")
    if not (model / "model.safetensors.index.json").is_file():
        subprocess.run([sys.executable, "-c", WRITE, str(model), json.dumps(CONFIG)], check=True)
    for case in [*CASES, *(LIMITED if limits.version() else ())]:
        for more in (0, MORE_BYTES) if case.limited else (0,):
            if not _is_settled(case, more, read(words.out)):
                _add(case, more, words.out, model if case.layers == LAYERS else _smaller(model, case.layers))
    return _report(read(words.out))


def _is_settled(case: Case, more: int, lines: Sequence[dict[str, Any]]) -> bool:
    """Whether it was tried with so many bytes on top, or needed fewer."""
    mine = _lines_of(case, lines)
    tried = any(line.get("more_bytes", 0) == more for line in mine)
    return tried or (bool(mine) and all(line.get("held") for line in mine[-NUM_RANKS:]))


def _add(case: Case, more: int, out: Path, model: Path) -> None:
    """A line for each rank."""
    plain = _lines_of(replace(case, limited=False), read(out)) if case.limited else []
    for line in _measure(case, model, [_bar_bytes(each) + more for each in plain]):
        with out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**asdict(case), **line, "more_bytes": more, "commit": commit()}) + "\n")


def _lines_of(case: Case, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Its ranks, in order."""
    wanted = (case.strategy, case.method, case.limited)
    return [line for line in lines if (line["strategy"], line["method"], line.get("limited", False)) == wanted]


def _like(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rank of the same case."""
    names = ("strategy", "method", "rank")
    return [each for each in lines if each.get("limited") and all(each[name] == line[name] for name in names)]


def _bar_bytes(line: dict[str, Any]) -> int:
    """What a rank may take more than before."""
    return int(line["kept_bytes"] + line["layer_bytes"] + CONSTANT_BYTES)


WRITE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
folder, config = Path(sys.argv[1]), LlamaConfig(**json.loads(sys.argv[2]))
folder.mkdir(parents=True, exist_ok=True)
config.save_pretrained(folder)
with torch.device("meta"):
    shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
lots = {}
for name in shapes:
    parts = name.split(".")
    lots.setdefault(f"layer-{parts[2]}" if parts[1] == "layers" else "tables", []).append(name)
where = {}
for lot, names in lots.items():
    tensors = {name: torch.randn(shapes[name]) * 0.02 for name in names}
    save_file(tensors, folder / f"{lot}.safetensors", {"format": "pt"})
    where |= dict.fromkeys(names, f"{lot}.safetensors")
index = {"metadata": {}, "weight_map": where}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
"""


def _smaller(model: Path, layers: int) -> Path:
    """The same model with its first layers alone."""
    folder = model.with_name(f"{model.name}-{layers}")
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    index = json.loads((model / "model.safetensors.index.json").read_text(encoding="utf-8"))
    kept = {f"layer-{number}.safetensors" for number in range(layers)} | {"tables.safetensors"}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file in kept}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in kept:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to((model / file).resolve())
    return folder


def _measure(case: Case, model: Path, bars: Sequence[int]) -> list[dict[str, Any]]:
    """Start the ranks, watch their memory while they load, and end them.

    bars: what each may take; none: what it likes.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + os.getpid() % 1000),
        "WORLD_SIZE": str(NUM_RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    order = json.dumps({**asdict(case), "model": str(model)})
    argv = [sys.executable, "-m", "benchmarks.load_memory", "--out", "-", "--rank", order]
    groups = [limits.ControlGroup(f"gangline-load-{os.getpid()}-{rank}") for rank, _ in enumerate(bars)]
    ranks = [
        subprocess.Popen(
            groups[rank].joined(argv) if groups else argv,
            env={**environment, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        return _hold(ranks, groups, bars, model) if bars else _watch(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for group in groups:
            group.remove()


def _hold(
    ranks: list[subprocess.Popen[str]], groups: Sequence[limits.ControlGroup], bars: Sequence[int], model: Path
) -> list[dict[str, Any]]:
    """No rank may take more than its bar until it has its part."""
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for file in model.glob("*.safetensors"):
        _drop(file)
    before = [_anonymous_bytes(rank.pid) for rank in ranks]
    most = [-(-(one + bar) // 2**20) for one, bar in zip(before, bars, strict=True)]
    for group, each in zip(groups, most, strict=True):
        group.limit(memory_mb=each, cpus=None)
    begun = time.monotonic()
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = []
    for number, (rank, group) in enumerate(zip(ranks, groups, strict=True)):
        assert rank.stdout is not None
        held = rank.stdout.readline() == LOADED and not group.num_killed()
        group.limit(memory_mb=1 << 20, cpus=None)
        told = {"rank": number, "before_bytes": before[number], "limit_bytes": most[number] << 20}
        said.append({**told, "held": held, "seconds": round(time.monotonic() - begun, 1)})
    return said


def _drop(file: Path) -> None:
    """No page of it in memory, for whom it would not count."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _watch(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    before = [_anonymous_bytes(rank.pid) for rank in ranks]
    peak, loaded, begun = list(before), [0] * len(ranks), time.monotonic()
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    said: list[dict[str, Any]] = []
    for rank in ranks:
        assert rank.stdout is not None
        os.set_blocking(rank.stdout.fileno(), False)
    texts = [""] * len(ranks)
    while not all("}" in text for text in texts):
        for number, rank in enumerate(ranks):
            assert rank.stdout is not None
            peak[number] = max(peak[number], _anonymous_bytes(rank.pid))
            with suppress(BlockingIOError):
                texts[number] += os.read(rank.stdout.fileno(), 1 << 16).decode()
            if not loaded[number] and LOADED in texts[number]:
                loaded[number] = peak[number]
            if rank.poll() is not None:
                raise SystemExit(f"rank {number} ended with {rank.returncode}")
        time.sleep(LOOK_S)
    for number, text in enumerate(texts):
        told = {"rank": number, "before_bytes": before[number], "peak_bytes": peak[number]}
        told["loaded_bytes"] = loaded[number] or peak[number]
        kept = json.loads(text.removeprefix(LOADED))
        said.append({**told, "seconds": round(time.monotonic() - begun, 1), **kept})
    return said


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _rank(order: dict[str, Any]) -> int:
    """One rank: import, meet, wait for the word, load, say what it keeps."""
    import peft  # noqa: F401  (a rank has imported it before)
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401

    from gangline.runs.gang import Gang, GangRank
    from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
    from gangline.strategies.zero.train import load_deepspeed
    from gangline.worker import session as building
    from gangline.worker.bench_scaling import random_samples
    from gangline.worker.process_group import join

    read_parts = building.read_parts

    def read_and_tell(*words: Any, **options: Any) -> None:
        read_parts(*words, **options)
        print(LOADED, end="", flush=True)
        time.sleep(0.3)

    building.read_parts = read_and_tell

    ranks = tuple(GangRank(host=f"pc{number}", share=1) for number in range(NUM_RANKS))
    stages = STAGES if order["strategy"] == "pipeline" else ()
    world = join(Gang(run_id="calm-otter-7", attempt=1, ranks=ranks, strategy=order["strategy"], stages=stages))
    job = Job(
        name="load",
        model=ModelJob(path=order["model"]),
        method=MethodJob(kind=order["method"]),
        data=DataJob(train=SourceJob(), sequence_length=128),
        batch=NUM_RANKS,
        micro_batch=1,
        steps=1,
        epochs=None,
        precision="fp32",
    )
    if order["strategy"] == "zero-3":
        load_deepspeed(world.device)
    rows = random_samples(NUM_RANKS, length=128, vocabulary=CONFIG["vocab_size"])
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    session = building.build_session(job, world, train_set=rows, evaluation_set=None)
    kept = sum(each.nbytes for each in _kept(session))
    layer = 4 * (4 * 2048**2 + 3 * 2048 * 5632)
    whole = sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in session.model.parameters())
    print(json.dumps({"kept_bytes": kept, "layer_bytes": layer, "model_bytes": whole}), flush=True)
    time.sleep(60)  # until it is killed
    return 0


def _kept(session: Any) -> list[Any]:
    """What of weights and states is this rank's."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors, states = [*session.model.parameters(), *session.model.buffers()], session.optimizer.state
    if hasattr(session.strategy, "engine"):  # DeepSpeed's
        tensors = [each.ds_tensor for each in session.model.parameters()] + list(session.model.buffers())
        states = session.strategy.engine.optimizer.optimizer.state
        tensors += list(states)  # the weights in fp32, as they are updated
        tensors.append(session.strategy.engine.optimizer.grad_partitions_flat_buffer)
    for state in states.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def _report(lines: list[dict[str, Any]]) -> int:
    """A table; 1 if a rank is over the bar, but for ddp."""
    print(
        "\n| | kept, GiB | one layer | peak while loading | over the bar by | peak in all |\n|---|---|---|---|---|---|"
    )
    wrong = 0
    for line in (line for line in lines if not line.get("limited")):
        extra, most = (line[name] - line["before_bytes"] for name in ("loaded_bytes", "peak_bytes"))
        bar = _bar_bytes(line)
        wrong += line["strategy"] != "ddp" and extra > bar
        figures = [line["kept_bytes"], line["layer_bytes"], extra, extra - bar, most]
        name = f"{line['strategy']}, {line['method']}, rank {line['rank']}"
        print(f"| {name} | {' | '.join(f'{figure / 2**30:.2f}' for figure in figures)} |")
    print("\n| limited by the kernel to what it had and its bar | GiB | |\n|---|---|---|")
    for line in (line for line in lines if line.get("limited")):
        again = any(each.get("more_bytes") and each["held"] for each in _like(line, lines))
        wrong += not line["held"] and not again
        ended = f"has its part after {line['seconds']:.0f} s" if line["held"] else "**killed**"
        name = f"{line['strategy']}, {line['method']}, rank {line['rank']}"
        print(f"| {name} | {line['limit_bytes'] / 2**30:.2f} | {ended} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

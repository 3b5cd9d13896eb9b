"""How many tokens a second does `gangline serve` make for one chat and for several at a time, on this computer?

    python -m benchmarks.serving --out benchmarks/lines/serving.jsonl

A model of random weights is made, and served by the worker as `gangline serve` starts it. Rounds alternate: one chat,
then `--chats` of them at the same time, over HTTP, whole answers. With `--stages 3` the layers lie in three processes
of this computer, as `gangline serve --on A --on B --on C` has them on three hosts.

    python -m benchmarks.serving --at URL KEY --beside URL KEY --out benchmarks/lines/serving.jsonl

measures endpoints that are there: rounds alternate between one chat at the first, one at the second, and `--chats` at
the first; then `--burst` requests come to the first one at once.

With `--memory-mb` each process has a control group with so much memory; where the model is not served in it, the line
says how that ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

TOKEN = "only-for-this-benchmark"
CONTEXT = 2048


@dataclass(frozen=True)
class Place:
    """An endpoint of 127.0.0.1 whose model is called m."""

    port: int
    key: str

    @staticmethod
    def of(url: str, key: str) -> Place:
        """As `gangline serve` prints it."""
        return Place(int(url.removesuffix("/v1").rpartition(":")[2]), key)


def main() -> int:
    """Measure, print, and append a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=1, help="processes among which the layers are divided")
    parser.add_argument("--memory-mb", type=int, help="of each process; as root")
    parser.add_argument("--at", nargs=2, metavar=("URL", "KEY"), help="an endpoint that is there, in place of a model")
    parser.add_argument("--beside", nargs=2, metavar=("URL", "KEY"), help="with --at: another one, for comparison")
    parser.add_argument("--burst", type=int, default=0, help="with --at: so many requests at once")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    row = _there(words) if words.at else _made(words)
    row |= {
        "chats": words.chats,
        "tokens": words.tokens,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "load": os.getloadavg()[0],
        "time": time.time(),
    }
    with words.out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))
    return 0


def _there(words: argparse.Namespace) -> dict[str, Any]:
    """Endpoints that somebody serves."""
    at = Place.of(*words.at)
    beside = Place.of(*words.beside) if words.beside else None
    _chats(at, words.chats, words.tokens)  # warms up
    firsts, rounds = [], []
    for _ in range(words.rounds):
        firsts.append(_first_token_s(at))
        one = _chats(at, 1, words.tokens)
        rounds.append((one, _chats(beside, 1, words.tokens) if beside else one, _chats(at, words.chats, words.tokens)))
    found = {
        "first_token_s": statistics.median(firsts),
        "one": statistics.median(one for one, _, _ in rounds),
        "beside": statistics.median(other for _, other, _ in rounds) if beside else None,
        "several": statistics.median(several for _, _, several in rounds),
        "to_beside": statistics.median(one / other for one, other, _ in rounds) if beside else None,
        "ratio": statistics.median(several / one for one, _, several in rounds),
        "rounds": [[round(each, 3) for each in times] for times in rounds],
    }
    if words.burst:
        begun = time.perf_counter()
        found |= {"burst": words.burst, "burst_tokens_per_s": _chats(at, words.burst, 4)}
        found["burst_s"] = time.perf_counter() - begun
    return found


def _made(words: argparse.Namespace) -> dict[str, Any]:
    """A model that is made and served here."""
    with tempfile.TemporaryDirectory() as folder:
        num_weights = _write_model(words, Path(folder))
        with _served(Path(folder), words) as said:
            measured = _measured(Place(said["port"], TOKEN), words) if "port" in said else {"ended": said}
    return {
        "weights": num_weights,
        "stages": words.stages,
        "memory_mb": words.memory_mb,
        **measured,
        "plan": said.get("plan"),
    }


def _measured(at: Place, words: argparse.Namespace) -> dict[str, Any]:
    _chats(at, words.chats, words.tokens)  # warms up
    firsts = [_first_token_s(at) for _ in range(words.rounds)]
    pairs = [(_chats(at, 1, words.tokens), _chats(at, words.chats, words.tokens)) for _ in range(words.rounds)]
    return {
        "first_token_s": statistics.median(firsts),
        "one": statistics.median(one for one, _ in pairs),
        "several": statistics.median(several for _, several in pairs),
        "ratio": statistics.median(several / one for one, several in pairs),
        "ratios": [round(several / one, 2) for one, several in pairs],
    }


def _write_model(words: argparse.Namespace, folder: Path) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.train.tiny import VOCABULARY, write_tokenizer

    torch.manual_seed(1)
    hidden = words.hidden
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=words.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return sum(each.numel() for each in model.parameters())


@contextmanager
def _served(folder: Path, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the endpoint says: its port and its plan, or its error."""
    with ExitStack() as stack:

        def worker(*words: str) -> dict[str, Any]:
            limited = [] if asked.memory_mb is None else stack.enter_context(_group(asked.memory_mb))
            return stack.enter_context(_worker(limited, *words))

        behind = [worker("stage", str(folder), "--address=127.0.0.1") for _ in range(asked.stages - 1)]
        places = [f"--stage=s{number}=127.0.0.1:{said['port']}" for number, said in enumerate(behind, 1)]
        engine = ["--engine=stages", *places] if places else []
        yield worker("serve", str(folder), "--name=m", f"--parallel={asked.chats}", *engine)


@contextmanager
def _group(memory_mb: int) -> Iterator[list[str]]:
    """Words before a command that put it into a control group with so much memory, and nothing else of it."""
    from tests.lab.limits import ControlGroup

    group = ControlGroup(f"serving-{os.getpid()}-{time.monotonic_ns()}")
    group.limit(memory_mb=memory_mb, cpus=None)
    try:
        yield ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.folders["memory"] / "cgroup.procs")]
    finally:
        group.remove()


@contextmanager
def _worker(limited: list[str], *words: str) -> Iterator[dict[str, Any]]:
    """A worker; the first line that it says, or its exit code where it ends without one."""
    argv = [*limited, sys.executable, "-m", "gangline.worker", *words]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"token": TOKEN, "stage_key": TOKEN}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        yield json.loads(line) if line else {"exit_code": process.wait(120)}
    finally:
        process.stdin.close()
        process.wait(120)
        process.stdout.close()


def _post(at: Place, prompt: str, num_tokens: int, *, stream: bool = False) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", at.port, timeout=600)
    asked = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": stream}
    headers = {"Authorization": f"Bearer {at.key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    return connection


def _first_token_s(at: Place) -> float:
    """From the request to the first text of a stream."""
    begun = time.perf_counter()
    connection = _post(at, "the first word about tea", 4, stream=True)
    with connection.getresponse() as answer:
        answer.readline()
        taken = time.perf_counter() - begun
        answer.read()
    connection.close()
    return taken


def _chats(at: Place, number: int, num_tokens: int) -> float:
    """Tokens per second of that many answers at the same time."""
    counts: list[int] = []

    def ask(index: int) -> None:
        connection = _post(at, f"question {index} about tea", num_tokens)
        counts.append(json.loads(connection.getresponse().read())["usage"]["completion_tokens"])
        connection.close()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(number)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) != number:
        raise SystemExit(f"{number - len(counts)} of {number} requests failed")
    return sum(counts) / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())

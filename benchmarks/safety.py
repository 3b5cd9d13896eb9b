"""Secrets, sockets and rights in the lab, for longer than a test may take, and with the real trainer.

    python -m benchmarks.safety --out safety.jsonl --rounds 5

Every round is a story of tests/lab/secret_story.py on three hosts, and one of `gangline train`: dry run, start, a
rank that is killed, resume, stop, resume, export. One JSON line per story is added to the file: what was counted,
where every count but `commands`, `looks`, `probes` and `hostile_words` should be 0; `which_doors` are the sockets that
listen elsewhere than allowed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.hosts import Lab, lab_folders
from tests.lab.searched import rights
from tests.lab.secret_story import TOKENS, Story, digest
from tests.lab.user import JOB, TEXT, make_model

MADE = ("gangline", ".local")
STEPS = 600


def main() -> None:
    """Tell all stories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("command", "train"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        stories: dict[str, Callable[[], dict[str, Any]]] = {"command": tell_command, "train": lambda: tell_train(model)}
        for number in range(arguments.rounds):
            for name in [arguments.only] if arguments.only else stories:
                begun = time.monotonic()
                line = {"case": name, "round": number, **stories[name](), "seconds": round(time.monotonic() - begun)}
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**line, "commit": _commit()}) + "\n")
                print(json.dumps(line), flush=True)


def tell_command() -> dict[str, Any]:
    """The user's own command, with everything going wrong once."""
    with Lab(3, meshed=True, ttl_s=1800) as lab:
        story = Story(lab)
        story.tell()
        whole = [{"tokens": digest(TOKENS.values()), "words": digest(story.words), "values": digest(story.values)}] * 3
        return {
            "hostile_words": len(story.words) + len(story.values),
            "received_otherwise": int(story.received != whole),
            "strange_holders": len(story.holding) - 6,
            "left_after_kill": len(story.left),
            "processes_after_stop": len(story.processes),
            **counts(story),
        }


def tell_train(model: Path) -> dict[str, Any]:
    """The trainer, killed and resumed, stopped and resumed, exported."""
    with Lab(3, meshed=True, binds=lab_folders(), ttl_s=1800) as lab:
        story = Story(lab)
        story.plants()
        _bring(story, model)
        with story.watch:
            _train(story)
        return {"processes_after_end": sum(len(host.processes()) for host in lab.hosts), **counts(story)}


def _bring(story: Story, model: Path) -> None:
    story.user.check(["mkdir", "model"])
    for file in model.iterdir():
        story.lab.user.write(story.user.home / "model" / file.name, file.read_bytes())
    story.user.write("fox.txt", TEXT)
    story.user.write(
        "job.yaml", JOB.replace("steps: 400", f"steps: {STEPS}").replace("every_steps: 50", "every_steps: 5")
    )
    story.types("init", *(host.name for host in story.lab.hosts), "--yes")
    python = f"python: {sys.executable}\n    slots: 1"
    story.user.write("cluster.yaml", story.user.read("cluster.yaml").replace("slots: 1", python))


def _train(story: Story) -> None:
    story.types("check", "--json")
    story.types("plan", "job.yaml")
    story.types("train", "job.yaml", "--dry-run")
    run = story.types("train", "job.yaml", "--detach", timeout_s=300).strip()
    _await_step(story, run, 30)
    story.kills(story.lab.hosts[2], "[g]angline.worker train")
    story.types("attach", run, code=5, timeout_s=300)
    story.types("logs", run)
    story.types("resume", run, "--detach", timeout_s=300)
    _await_step(story, run, 60)
    story.types("stop", run, timeout_s=300)
    story.types("resume", run, timeout_s=600)
    story.types("logs", run, "--console")
    story.types("export", run, timeout_s=300)


def _await_step(story: Story, run: str, step: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        rows = json.loads(story.types("ps", "--json"))["runs"]
        row = next(row for row in rows if row["id"] == run)
        if (row["step"] or 0) >= step:
            return
        time.sleep(1)
    raise TimeoutError(f"{run} does not come to step {step}: {row}")


def counts(story: Story) -> dict[str, Any]:
    """What there should be nothing of, and how much was looked at."""
    probes, doors = story.doors()
    machines = [(each, [story.user.home / name for name in MADE]) for each in story.lab.machines]
    rows = [row for machine, tops in machines for row in rights(machine, tops)]
    open_to_all = [door for door in doors if not (door["address"].startswith("127.") or _is_torchs(door))]
    return {
        "commands": len(story.said),
        "looks": story.watch.ticks,
        "probes": len(probes),
        "secrets_printed": len(story.printed()),
        "secrets_in_command_lines": len(story.watch.of("word")),
        "secrets_in_files": len(story.found()),
        "doors": len(open_to_all),
        "which_doors": open_to_all[:8],
        "for_others": sum(mode[0] != "l" and mode[4:] != "------" for mode, _, _ in rows),
    }


def _is_torchs(door: dict[str, Any]) -> bool:
    """Ports of torch's own: the store of torchrun, and what gloo opens in a rank."""
    return any("torch.distributed.run" in owner or "gangline.worker train" in owner for owner in door["owners"])


def _commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip()


if __name__ == "__main__":
    main()

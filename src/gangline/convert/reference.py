"""docs/moving-in.md and config/foreign_names.json, from the tables: python -m gangline.convert.reference ROOT."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gangline.config.job_model import FOREIGN, JobWords
from gangline.convert import features
from gangline.convert.move import TOOLS
from gangline.convert.outcomes import Foreign, Tool, judge

PROBES = (True, 3, 0.5, "other", ["other"], {"other": 1})
"""Values that switch a key on in one way or another: what it asks for then."""
CONTEXTS: tuple[Mapping[str, object], ...] = (
    {},
    {
        "adapter": "lora",
        "use_peft": True,
        "finetuning_type": "lora",
        "val_set_size": 0.1,
        "datasets.0.type": "chat_template",
    },
    {"rl": "dpo", "sample_packing": True, "lr_scheduler_type": "cosine", "eval_strategy": "steps", "bf16": False},
)
"""Neighbours without which some keys say nothing."""
PAGE = "docs/moving-in.md"
NAMES = "src/gangline/config/foreign_names.json"
HEAD = """\
# Moving in from another trainer

```sh
gangline convert axolotl.yaml --world-size 8      # Axolotl, LLaMA-Factory, TRL, transformers, torchtune
gangline convert train.yaml accelerate.yaml       # with what accelerate or DeepSpeed says besides
gangline convert train.yaml --dry-run optimizer.learning_rate=1e-4
gangline convert inventory.ini                    # hosts of Ansible, Ray, SkyPilot, ssh_config
```

`convert` prints what became of every key of the file, and writes `job.yaml` (or `cluster.yaml`) where
nothing that changes numbers is lost:

| verdict | meaning |
|---|---|
| same | the job says the same |
| equivalent | the job computes the same from other words, or differs by rounding or random draws, as stated |
| dropped | no number changes without it: speed, memory, places, figures, and how devices share the work |
| refused | numbers would change, and the missing feature is named; so is every key that nobody knows |
| default | the file is silent, the other tool does something else than gangline, and the job says so |

- A refused key ends it with exit code 2, and nothing is written. Say in a key of the job what the file leaves
  open (`data.format=chat`), or give the key up by name (`--leave-out KEY`).
- The batch of the job is samples x accumulation x the number of GPUs that the file ran on. A file that does
  not say it needs `--world-size N`, or an answer at the terminal. The batch then stays, on any machines.
- A chat template that a file names is written beside the job. Those of Axolotl are found where Axolotl is
  installed, or by `--templates FOLDER`; `data.chat_template=FILE` names another.
- The strategy is not taken over: the plan chooses, and every choice but `local-sgd` computes the same
  numbers. A file of DeepSpeed or accelerate alone is about the strategy, and keeps it.
- `train` and `plan` recognise a file of another trainer and offer the command. A list of hosts without
  addresses is answered with the `gangline init` that asks the hosts.

"""


def page(tools: Sequence[Tool]) -> str:
    """The whole page: the prose, and the table of features that gangline lacks with the keys that ask for them."""
    found = lacking(tool for tool in tools if tool.name != TRAINER)
    rows = [
        f"| {feature} | {tool} | {_shown(keys)} |" for feature in sorted(found) for tool, keys in found[feature].items()
    ]
    total = sum(len(tool.keys) for tool in tools if tool.name != TRAINER)
    return (
        f"{HEAD}## What the others have and gangline lacks\n\n"
        f"The tables have {total} keys. These ask for something that gangline does not have, with some value; TRL\n"
        "stands for transformers' Trainer, too. `python -m gangline.convert.reference .` writes this page from the\n"
        "tables that `convert` reads.\n\n"
        "| missing | tool | keys |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


TRAINER = "transformers' Trainer"


def lacking(tools: Iterable[Tool]) -> dict[str, dict[str, list[str]]]:
    """Missing feature -> tool -> keys that ask for it, with some value and beside some neighbours."""
    named = {value for name, value in vars(features).items() if name.isupper()}
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for tool in tools:
        for key in tool.keys:
            for feature in sorted(_asked(tool, key, named)):
                found[feature][tool.name].append(key)
    return found


def _asked(tool: Tool, key: str, named: set[str]) -> set[str]:
    name = key.replace("*", "0")
    asked = set()
    for context in CONTEXTS:
        for value in PROBES:
            outcome = judge(tool, name, value, Foreign(values={**context, name: value}))
            if outcome.verdict == "refused":
                asked |= {feature for feature in named if outcome.reason.startswith(feature)}
    return asked


MOST = 4
"""More keys of one tool are counted."""


def _shown(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - MOST} more" if len(keys) > MOST else ""
    return ", ".join(f"`{key}`" for key in keys[:MOST]) + more


def names() -> list[str]:
    """Names of keys that mean something to another trainer and nothing to us: none of them is a slip of the pen."""
    ours = set(re.findall(r'"([a-z0-9_]+)":', json.dumps(JobWords.model_json_schema())))
    theirs = {key.partition(".")[0] for tool in TOOLS.values() for key in tool.keys}
    return sorted(theirs - ours - FOREIGN_KEYS.keys() - {"*"})


FOREIGN_KEYS = {name: ours for name, ours in FOREIGN.items() if ours}


def main(argv: Sequence[str]) -> None:
    """Write both files below the root of the repository."""
    root = Path(argv[1])
    (root / PAGE).write_text(page(tuple(TOOLS.values())), encoding="utf-8")
    (root / NAMES).write_text(json.dumps(names(), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv)

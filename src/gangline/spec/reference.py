"""The reference of every key, `docs/job.md` and `docs/cluster.md`, written from the words themselves.

`python -m gangline.spec.reference <root of the repository>` writes the pages and the schemas; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gangline.runs.files import write_atomic
from gangline.spec.schema import cluster_schema, job_schema, schema_text
from gangline.spec.words import Schema, expected_words, section, yaml_words

_EDITOR = """\
Editors that speak YAML language server (VS Code with the YAML extension, Neovim, Zed) check the file and complete
its keys when its first line names the schema, a path or a URL:

```yaml
# yaml-language-server: $schema=src/gangline/spec/schemas/{kind}.schema.json
```
"""

_JOB = """\
# job.yaml: what to train

```yaml
model: ./llama                  # a folder, or owner/name on the Hugging Face hub
method: lora                    # or full
data:
  train: data/train.jsonl       # a path, globs, or hub:owner/name/config@revision#split
  eval: data/test.jsonl         # the same, a fraction such as 0.05, or none
  format: completion
  fields: {prompt: question, completion: answer}
batch: 32                       # samples in one step, over all machines together
micro_batch: 4                  # samples that one device computes at once
epochs: 3                       # or steps: 500
```

- Three keys are required: `model`, `data.train` and `batch`.
- The file is YAML 1.2: `1e-4` is a number, `yes` and `no` are texts, and a repeated key is a mistake.
- Relative paths in the file begin at the file's own folder; relative paths on the command line at the current folder.
- Any key can be set on the command line: `optimizer.learning_rate=1e-4 data.train='[a.jsonl, b.jsonl]' steps=10`.
  The command line wins over the file, and the file over the defaults; `steps` there replaces `epochs` in the file.
- All mistakes are reported at once, each with its line and column, what was expected, and what to write.
- The resolved job, with every default filled in, is kept with the run as `job.json`.

"""

_CLUSTER = """\
# cluster.yaml: where to train

```yaml
name: home
hosts:
  - {name: pc1, transport: local, workdir: ~/gang/pc1, slots: 1, share: 3}
  - {name: pc2, transport: local, workdir: ~/gang/pc2, slots: 1, share: 2}
  - {name: pc3, transport: local, share: 1, env: {OMP_NUM_THREADS: 1}}
```

- Without a cluster file there is one host, `local`: this computer, with gangline's home as its work folder.
- `transport: local` makes a host of this computer, whatever it is called; several of them are several hosts with their
  own folders and ranks. `localhost`, `127.0.0.1` and this computer's own name need no `transport`.
  Hosts over SSH are not built yet.
- Host names have letters, digits, `.`, `_` and `-`, and begin with a letter or a digit.
- Relative paths begin at the file's own folder. Items of a list are overridden by name: `hosts.pc1.slots=2`.
- Hosts can share keys: `{name: pc1, <<: &common {transport: local, slots: 2}}`, then `<<: *common`.

## Hostfiles

A file in the manner of DeepSpeed and MPI is a cluster, too. A line is a host, its slots, an interface and variables:

```text
# name    slots    interface  variables
localhost slots=2  lo         NCCL_DEBUG=INFO OMP_NUM_THREADS=1
```

A file whose name ends in `.yaml`, `.yml` or `.json` is a cluster file, any other a hostfile; lines with `slots=` are
recognised under any name. `slots` left out is 1.

"""


def job_reference() -> str:
    """docs/job.md."""
    return _JOB + _EDITOR.format(kind="job") + _tables(job_schema())


def cluster_reference() -> str:
    """docs/cluster.md."""
    return _CLUSTER + _EDITOR.format(kind="cluster") + _tables(cluster_schema())


def written_files() -> dict[str, str]:
    """Every file that is written from the words: path below the root of the repository -> content."""
    return {
        "docs/job.md": job_reference(),
        "docs/cluster.md": cluster_reference(),
        "src/gangline/spec/schemas/job.schema.json": schema_text(job_schema()),
        "src/gangline/spec/schemas/cluster.schema.json": schema_text(cluster_schema()),
    }


def _tables(schema: Schema) -> str:
    """One table for each mapping, in the order in which they are met."""
    pages = [_table(schema, schema, title="Keys of the file")]
    queue: list[tuple[tuple[str, ...], Schema]] = [((name,), inner) for name, inner in schema["properties"].items()]
    while queue:
        path, fragment = queue.pop(0)
        inside = section(schema, fragment) or _items_section(schema, fragment)
        if inside is not None:
            pages.append(_table(schema, inside, title=f"`{'.'.join(path)}`"))
            queue = [((*path, name), inner) for name, inner in inside["properties"].items()] + queue
    return "".join(pages)


def _items_section(schema: Schema, fragment: Schema) -> Schema | None:
    items = fragment.get("items")
    return section(schema, items) if isinstance(items, dict) else None


def _table(schema: Schema, inside: Schema, *, title: str) -> str:
    rows = [_row(schema, name, fragment, inside) for name, fragment in inside["properties"].items()]
    lead = _line(inside.get("description", ""))
    head = "| key | value | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {title}\n\n{lead}\n\n{head}" + "".join(rows)


def _row(schema: Schema, name: str, fragment: Schema, inside: Schema) -> str:
    kind = expected_words(schema, fragment).partition(" with the keys")[0]
    below = section(schema, fragment) or {}
    meaning = _line(fragment.get("description") or below.get("description", ""))
    cells = [f"`{name}`", kind, _default(name, fragment, inside), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(name: str, fragment: Schema, inside: Schema) -> str:
    if name in inside.get("required", ()):
        return "**required**"
    value: Any = fragment.get("default")
    return "" if value is None or isinstance(value, dict) else f"`{yaml_words(value)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def main(root: Path) -> None:
    """Write the pages and the schemas below the root of the repository."""
    for name, content in written_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.encode(), mode=0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

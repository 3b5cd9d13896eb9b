"""The reference of every key, `docs/job.md` and `docs/cluster.md`, written from the words themselves.

`python -m gangline.config.reference <root of the repository>` writes the pages and the schemas; a test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gangline.config.cluster_model import ClusterWords
from gangline.config.fields import PLUGIN, Section
from gangline.config.job_model import JobWords
from gangline.config.validate import Schema, expected_words, section, yaml_words
from gangline.runs.files import write_atomic

# JSON Schemas of `job.yaml` and `cluster.yaml` for editors. `python -m gangline.config.reference` writes them.


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, shorthands included."""
    return _schema(JobWords, title="gangline job")


def cluster_schema() -> dict[str, Any]:
    """The JSON Schema of a cluster file, shorthands included."""
    return _schema(ClusterWords, title="gangline cluster")


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as it lies in `schemas/`."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema(kind: type[Section], *, title: str) -> dict[str, Any]:
    schema: dict[str, Any] = _without_titles(kind.model_json_schema())
    return {"$schema": DIALECT, "title": title, **schema}


def _without_titles(fragment: Any) -> Any:
    """Without pydantic's titles ("Learning Rate"), which repeat the keys, and without our own remarks.

    A name of a built-in row or of a plug-in may be any name: the schema is the same on every computer.
    """
    if isinstance(fragment, list):
        return [_without_titles(entry) for entry in fragment]
    if not isinstance(fragment, dict):
        return fragment
    if isinstance(fragment.get("x-built-in"), list):
        rest = {key: value for key, value in fragment.items() if key not in {"type", "enum", "x-built-in"}}
        kinds = [{"type": "string", "enum": fragment["x-built-in"]}, {"type": "string", "pattern": PLUGIN}]
        return {"anyOf": kinds, **_without_titles(rest)}
    return {
        key: {name: _without_titles(inner) for name, inner in value.items()}
        if key in {"properties", "$defs"}
        else _without_titles(value)
        for key, value in fragment.items()
        if not (key in {"title", "x-fix"} and isinstance(value, str))
    }


_EDITOR = """\
Editors that speak YAML language server (VS Code with the YAML extension, Neovim, Zed) check the file and
complete its keys when its first line names the schema, a path or a URL:

```yaml
# yaml-language-server: $schema=src/gangline/config/schemas/{kind}.schema.json
```
"""

_JOB = """\
# job.yaml: what to train

```yaml
model: ./llama                  # a folder, or owner/name on the Hugging Face hub
method: lora                    # or qlora, full
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
- Relative paths in the file begin at the file's own folder; relative paths on the command line at the current
  folder.
- Any key can be set on the command line:
  `optimizer.learning_rate=1e-4 data.train='[a.jsonl, b.jsonl]' steps=10`. The command line wins over the
  file, and the file over the defaults; `steps` there replaces `epochs` in the file.
- All mistakes are reported at once, each with its line and column, what was expected, and what to write.
- The resolved job, with every default filled in, is kept with the run as `job.json`.

"""

_CLUSTER = """\
# cluster.yaml: where to train

`gangline init pc1 pc2 pc3` writes this file. By hand:

```yaml
name: home
environment: locked             # gangline builds a virtual environment on every host
hosts:
  - name: pc1                   # this computer: the first host is the head
    transport: local
    address: 192.168.1.10
    share: 3
  - name: pc2
    ssh: alice@192.168.1.11     # or a name of your ssh_config
    host_key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
    slots: 2
    share: 2
  - {name: pc3, ssh: 192.168.1.12, port: 2222, workdir: /data/gangline, share: 1, env: {OMP_NUM_THREADS: 1}}
```

- Without a cluster file there is one host, `local`: this computer, with gangline's home as its work folder.
- gangline reaches a host with your own `ssh`: its configuration, agent, keys and jump hosts apply. Only trust
  is different: gangline accepts `host_key` and no other key, even if your known_hosts has one.
  `gangline init --pin cluster.yaml` reads the keys again, shows old and new fingerprints, and asks.
- `transport: local` makes a host of this computer under any name. Several such hosts have folders and ranks
  of their own. `localhost`, `127.0.0.1` and this computer's own name need no `transport`.
- Names have letters, digits, `.`, `_` and `-`, and begin with a letter or a digit. A destination is a name,
  an address, or `user@` and one of these.
- Where hosts are on more than one computer, each needs an `address` at which the others reach it.
- Relative paths (`lock`; `workdir` and `python` on this computer) begin at the file's own folder. Paths on
  another host begin with `/`, or with `~/` for the home folder there.
- Items of a list are overridden by name: `hosts.pc1.slots=2`.
- Hosts can share keys: `{name: pc1, <<: &common {port: 2222, slots: 2}}`, then `<<: *common`.

## Let it be written

```sh
gangline init pc1 alice@192.168.1.11 localhost   # names of your ssh_config, addresses, this computer
gangline init --hostfile hostfile                # the hosts of a DeepSpeed or MPI hostfile
gangline init                                    # asks, and offers the hosts of your ssh_config
gangline init --pin cluster.yaml                 # reads the host keys again; nothing else in the file changes
```

`init` asks every host for its key, shows the fingerprints, and trusts those that you accept. `--yes` accepts
all; without a terminal and without `--yes`, `init` ends with exit code 2. It does not ask about a key that
your known_hosts has. A key that differs from known_hosts ends `init`. Then `init` reads the hosts, installs
nothing, and writes:

- `address`: in the best network that all hosts share: wired before wireless, IPv4 before IPv6, fast before
  slow. A network inside a machine (docker0, virbr0) comes last. Where hosts share several networks, `init`
  tests whether they reach each other there. A comment in the file gives the reason.
- `slots`: the number of GPUs, or 1. A value of the hostfile stays.
- `workdir`: only where hosts share one home folder, so that each has a folder of its own.

`init` replaces an existing file only with `--force`. It names the hosts that fail, with the reason, and
writes the file without them if you agree, or with `--force`. `--dry-run` prints the file.

## Where Python comes from

`environment` at the top applies to all hosts, `environment` at a host to that one:

| value | the ranks run with |
|---|---|
| `locked` | a virtual environment that gangline builds on the host, from the lock that comes with it |
| `{lock: ./requirements.lock}` | the same, from your lock |
| `{conda: /opt/conda/envs/train}` | the conda environment in that folder |
| `{modules: [cuda/12.8, python/3.12]}` | the Python that `module load` puts in place |
| `{apptainer: /images/train.sif}` | the Python inside that image |
| `{python: /opt/train/bin/python}` | that Python; `python: ...` at a host means the same |

## What starts gangline on the hosts

`backend` names the launcher. Under each one the same supervisor runs, and ranks meet in the same way.

| `backend` | how a host agent comes to its host |
|---|---|
| `direct` (default) | one ssh connection per host, or none on this computer |
| `mpirun` | one OpenMPI `mpirun` on the head starts all of them |

Under `mpirun` every restart imports torch anew, and the loss of one host ends the ranks on all hosts; the
next attempt runs without that host. Two starts at the same moment on the same slots may both fail. `check`,
`plan`, `train`, `run` and `resume` print a line about it that begins with `backend`. `mpirun` needs:

- OpenMPI on every host (Debian: `apt install openmpi-bin`).
- A head that logs in to the other hosts by the addresses of this file, without a password and with host
  keys that it knows: try `ssh ADDRESS true` there. All hosts have the same user and the same ssh port.

When mpirun ends for any reason, the host agents make their ranks save and leave. Then the run fails, or
continues with the next attempt if the job allows restarts. Tokens reach the hosts as under `direct`: by
gangline's own connections, never on a disk or in a command line.

**Slurm.** gangline cannot start anything inside an allocation yet: `scancel` would not end its ranks. With
`SLURM_JOB_ID` set, `train`, `run` and `resume` refuse to start; `ps`, `logs`, `explain` and the others
work.

## Hostfiles

A hostfile of DeepSpeed or MPI works as a cluster file, too. A line is a host, its slots, an interface and
variables:

```text
# name    slots    interface  variables
localhost slots=2  lo         NCCL_DEBUG=INFO OMP_NUM_THREADS=1
```

A file whose name ends in `.yaml`, `.yml` or `.json` is a cluster file, any other a hostfile; lines with
`slots=` are recognised under any name. `name:N` is `name slots=N`; `slots` left out is 1. A hostfile has
neither addresses nor host keys of other computers: `gangline init --hostfile FILE` reads them from the hosts
and writes a cluster.yaml.

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
        "src/gangline/config/schemas/job.schema.json": schema_text(job_schema()),
        "src/gangline/config/schemas/cluster.schema.json": schema_text(cluster_schema()),
    }


def _tables(schema: Schema) -> str:
    """One table for each mapping, in the order in which they are met; the second of a kind is left out."""
    pages = [_table(schema, schema, title="Keys of the file")]
    shown: list[Schema] = []
    queue: list[tuple[tuple[str, ...], Schema]] = [((name,), inner) for name, inner in schema["properties"].items()]
    while queue:
        path, fragment = queue.pop(0)
        inside = section(schema, fragment) or _items_section(schema, fragment)
        if inside is not None and not any(inside is other for other in shown):
            shown.append(inside)
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

"""The changes of `prepare` as an inventory and a playbook of Ansible, with modules of ansible.builtin alone.

A task looks at each thing before one changes it, and a thing that is neither as it was read nor as it shall be ends the
play. Steps that can lock out go as a script with its own timer, which a task confirms over a new connection.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from gangline.prepare.host_scripts import host_script
from gangline.prepare.prepare_step import CommandChange, FileChange, HostReading, StepPlan
from gangline.report.commands import joined
from gangline.runs.cluster import Host
from gangline.transport.ssh_options import printable

Task = dict[str, Any]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRIPTS = "/var/lib/gangline/prepare-script"
KNOWN_HOSTS = '"{{ inventory_dir }}/known_hosts"'
STATES: dict[str, dict[str, Any]] = {
    "enable": {"enabled": True},
    "start": {"state": "started"},
    "mask": {"masked": True},
    "reload": {"state": "reloaded"},
    "restart": {"state": "restarted"},
}
"""Words of systemctl -> what they are to Ansible's module."""
REPLACED = frozenset({"systemctl", "service", "mount", "apt-get", "rpm", "rsync", "sed", "dnf", "yum"})
"""Programs in whose place ansible-lint wants a module: none does the same with a reverse."""
NOQA = "noqa: command-instead-of-module"
HEAD = """---
# What `gangline prepare` would change, for: ansible-playbook -i inventory.yml playbook.yml
# With -K where sudo asks for a password. The first run makes the changes, a second one changes nothing."""


def playbook_files(
    plans: Mapping[str, Mapping[str, StepPlan]], hosts: Sequence[Host], readings: Mapping[str, HostReading]
) -> dict[str, bytes | str]:
    """Name -> content of each file of the folder; nothing where no host has to be changed."""
    files: dict[str, bytes | str] = {}
    plays = []
    chosen = [host for host in hosts if any(plan.changes for plan in plans.get(host.name, {}).values())]
    for host in chosen:
        play = _Play(host=host.name, reading=readings[host.name], files=files)
        for step, plan in plans[host.name].items():
            if plan.changes:
                play.add(step, plan)
        plays.append(play.to_yaml())
    if not plays:
        return {}
    inventory = {"all": {"hosts": {host.name: _reached(host) for host in chosen}}}
    files["playbook.yml"] = "\n".join((HEAD, *_yaml(plays), ""))
    files["inventory.yml"] = "\n".join(("---", *_yaml(inventory), ""))
    files["known_hosts"] = "".join(f"{host.name} {host.host_key}\n" for host in chosen if host.host_key)
    return files


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Lines of YAML; every text in double quotes, as JSON has it, so that none is taken for something else."""
    if isinstance(value, list):
        rows = [
            _yaml(each, f"{indent}  ") if isinstance(each, dict) else [f"{indent}  {_scalar(each)}"] for each in value
        ]
        return [
            f"{indent}- {first[len(indent) + 2 :]}" if not at else first for row in rows for at, first in enumerate(row)
        ]
    found: list[str] = []
    for key, each in value.items():
        if key == NOQA:
            found[0] += f"  # {NOQA}"
        elif isinstance(each, dict | list):
            found += [f"{indent}{key}:", *_yaml(each, f"{indent}  ")]
        else:
            found.append(f"{indent}{key}: {_scalar(each)}")
    return found


def _scalar(value: str | bool | int) -> str:
    return json.dumps(value, ensure_ascii=False)


def _reached(host: Host) -> dict[str, Any]:
    """How Ansible reaches a host: as gangline does, and with the same key of its sshd only."""
    if host.transport == "local":
        return {"ansible_connection": "local"}
    user, _, place = (host.ssh or host.name).rpartition("@")
    found: dict[str, Any] = {"ansible_host": place}
    found |= {"ansible_user": user} if user else {}
    found |= {"ansible_port": host.ssh_port} if host.ssh_port else {}
    if host.host_key:
        options = ("StrictHostKeyChecking=yes", f"HostKeyAlias={host.name}", f"UserKnownHostsFile={KNOWN_HOSTS}")
        found["ansible_ssh_common_args"] = " ".join(f"-o {option}" for option in options)
    return found


def _plain(text: str) -> str:
    """Text that Ansible does not take for a template."""
    return f"{{% raw %}}{text}{{% endraw %}}" if re.search(r"\{[{%#]", text) else text


def _title(step: str, verb: str, thing: str) -> str:
    words = printable(thing).replace("\n", " ")
    return _name(f"{step.capitalize()} | {verb} {words if len(words) <= 80 else words[:77] + '...'}")


def _name(text: str) -> str:
    """The name of a task: no template."""
    return re.sub(r"[{}]", "_", text)


@dataclass(slots=True, kw_only=True)
class _Play:
    """The tasks of one host, and the files that they bring."""

    host: str
    reading: HostReading
    files: dict[str, bytes | str]
    tasks: list[Task] = field(default_factory=list)
    handlers: list[Task] = field(default_factory=list)

    def to_yaml(self) -> Task:
        """The play."""
        play: Task = {"name": f"Prepare {self.host}", "hosts": self.host, "gather_facts": False}
        play |= {"environment": {"PATH": PATH}, "tasks": self.tasks}
        return play | ({"handlers": self.handlers} if self.handlers else {})

    def add(self, step: str, plan: StepPlan) -> None:
        """The tasks of a step."""
        if plan.revert_s is not None:
            self._add_script(step, plan)
            return
        probed = [change for change in plan.changes if isinstance(change, FileChange) or change.probe]
        rest = [change for change in plan.changes if isinstance(change, CommandChange) and not change.probe]
        rest = [change for change in rest if change.argv]
        told = (
            [_name(f"{step.capitalize()} on {self.host}: {joined(change.argv)}") for change in rest] if probed else []
        )
        looks, makes = [], []
        for number, change in enumerate(probed, start=1):
            name = f"{re.sub('[^a-z0-9]', '_', step)}_{number}"
            look, make = (
                self._file(step, name, change) if isinstance(change, FileChange) else _command(step, name, change)
            )
            root = {"become": True} if change.scope == "root" else {}
            looks += [_with(task, root if "register" in task else {}) for task in look]
            makes += [
                _with(task, root | ({"notify": told} if told and "register" not in task else {})) for task in make
            ]
        self.tasks += [*looks, *makes]
        for change in rest:
            task = _run(f"{step.capitalize()} on {self.host}: {joined(change.argv)}", change.argv)
            _with(task, {"become": True} if change.scope == "root" else {})
            (self.handlers if told else self.tasks).append(task)
        if told:
            self.tasks.append(
                {"name": _title(step, "Put into force", "what changed"), "ansible.builtin.meta": "flush_handlers"}
            )

    def _file(self, step: str, name: str, change: FileChange) -> tuple[list[Task], list[Task]]:
        """Look at a file, and change it; its old content stays beside it."""
        digests = [_digest(change.before), _digest(change.content)]
        look: list[Task] = [
            {
                "name": _title(step, "Look at", change.path),
                "ansible.builtin.stat": {"path": _plain(change.path), "follow": True, "checksum_algorithm": "sha256"},
                "register": name,
            },
            {
                "name": _title(step, "Require as it was read:", change.path),
                "ansible.builtin.assert": {
                    "that": [f"{name}.stat.checksum | default('absent') in gangline_digests"],
                    "fail_msg": _plain(f"somebody changed {change.path} since: write these files anew"),
                },
                "vars": {"gangline_digests": digests},
            },
        ]
        if change.content is None:
            gone = {"path": _plain(change.path), "state": "absent"}
            return look, [{"name": _title(step, "Remove", change.path), "ansible.builtin.file": gone}]
        source = f"files/{self.host}/{name}-{re.sub(r'[^A-Za-z0-9._-]', '_', PurePosixPath(change.path).name)}"
        self.files[source] = change.content
        folder = _plain(str(PurePosixPath(change.path).parent))
        make: list[Task] = []
        if change.before is None:
            make.append(
                {
                    "name": _title(step, "Look at", folder),
                    "ansible.builtin.stat": {"path": folder},
                    "register": f"{name}_folder",
                }
            )
            made = {"path": folder, "state": "directory", "mode": f"0{change.folder_mode:o}"}
            make.append(
                {
                    "name": _title(step, "Make", folder),
                    "ansible.builtin.file": made,
                    "when": f"not {name}_folder.stat.exists",
                }
            )
        copied = {
            "src": source,
            "dest": _plain(change.path),
            "mode": self._mode(change),
            "backup": True,
            "follow": True,
        }
        make.append({"name": _title(step, "Change", change.path), "ansible.builtin.copy": copied})
        return look, make

    def _mode(self, change: FileChange) -> str:
        known = self.reading.files.get(change.path)
        mode = change.mode if change.mode is not None else known.mode if known else None
        return f"0{0o644 if mode is None else mode:o}"

    def _add_script(self, step: str, plan: StepPlan) -> None:
        """A step that can lock out: its timer has to be on the host."""
        source, place = f"scripts/{self.host}-{step}.sh", f"{SCRIPTS}/{step}.sh"
        self.files[source] = host_script(self.host, {step: plan}, self.reading)
        folder = {"path": SCRIPTS, "state": "directory", "mode": "0700"}
        brought = {"src": source, "dest": place, "mode": "0600"}
        name = f"{re.sub('[^a-z0-9]', '_', step)}_script"
        self.tasks += [
            {"name": _title(step, "Make", SCRIPTS), "ansible.builtin.file": folder, "become": True},
            {"name": _title(step, "Bring", source), "ansible.builtin.copy": brought, "become": True},
            {
                "name": _title(step, "Change", "what goes back by itself unless a new login works"),
                "ansible.builtin.command": {"argv": ["/bin/bash", place]},
                "register": name,
                "changed_when": f"'nothing to change' not in {name}.stdout",
                "become": True,
            },
            {"name": _title(step, "Log in", "anew"), "ansible.builtin.meta": "reset_connection"},
            {
                "name": _title(step, "Keep", "it, for this login works"),
                "ansible.builtin.command": {"argv": ["/bin/bash", place, "keep"]},
                "when": f"'Log in ANEW' in {name}.stdout",
                "changed_when": True,
                "become": True,
            },
        ]


def _command(step: str, name: str, change: CommandChange) -> tuple[list[Task], list[Task]]:
    """Look at the state of a thing, and run its command unless it is so already."""
    known = {"before": _plain(change.before), "after": _plain(change.after or "")}
    said = f"{name}.stdout | default('') | trim"
    after = "" if change.after is None else ", gangline.after"
    look: list[Task] = [
        _with(
            _run(_title(step, "Look at", joined(change.probe)), change.probe, only_reads=True),
            {"register": name, "changed_when": False, "failed_when": False, "check_mode": False},
        )
    ]
    if change.after is not None:
        look.append(
            {
                "name": _title(step, "Require as it was read:", joined(change.probe)),
                "ansible.builtin.assert": {
                    "that": [f"{said} in [gangline.before{after}]"],
                    "fail_msg": _plain(f"somebody changed what {joined(change.probe)} shows: write these files anew"),
                },
                "vars": {"gangline": known},
            }
        )
    if not change.argv:
        return look, []
    make = _run(_title(step, "Run", joined(change.argv)), change.argv)
    is_due = f"{said} == gangline.before" if change.after is None else f"{said} != gangline.after"
    return look, [_with(make, {"when": is_due, "vars": {"gangline": known}})]


def _with(task: Task, more: Mapping[str, Any]) -> Task:
    """The same task, with its comment, and more keys."""
    task.update(more)
    return task


def _run(name: str, argv: Sequence[str], *, only_reads: bool = False) -> Task:
    """A task that runs a command, with Ansible's own module where it has one."""
    task: Task = {"name": _name(name)}
    if len(argv) == 3 and argv[0] == "systemctl" and argv[1] in STATES and not only_reads:
        task["ansible.builtin.systemd_service"] = {"name": argv[2], **STATES[argv[1]]}
        return task
    task["ansible.builtin.command"] = {"argv": [_plain(word) for word in argv]}
    task["changed_when"] = True
    if argv[0] in REPLACED:
        task[NOQA] = True
    return task


def _digest(content: bytes | None) -> str:
    return "absent" if content is None else hashlib.sha256(content).hexdigest()

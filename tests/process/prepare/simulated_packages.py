"""Simulated package managers: programs that record their words and change a list of names. Nothing is installed.

The folder of a host has `state.json` (what is installed, held, offered, and what `ubuntu-drivers` prints) and `argv`,
every call that changed something. Each program is this file by another name.
"""

import fnmatch
import json
import sys
from pathlib import Path

PROGRAMS = {
    "ubuntu": ("apt-get", "apt-cache", "apt-mark", "dpkg-query", "systemctl", "ubuntu-drivers"),
    "debian": ("apt-get", "apt-cache", "apt-mark", "dpkg-query", "systemctl"),
    "fedora": ("dnf", "rpm", "systemctl"),
    "suse": ("zypper", "rpm", "systemctl"),
}


def set_up(folder, family, *, offered=(), installed=(), units=None, devices="", gpgpu="", more=()):
    """The programs of a distribution in `folder/bin`, and the state that they work on."""
    state = folder / "state"
    (folder / "bin").mkdir(parents=True)
    state.mkdir()
    for name in (*PROGRAMS[family], *more):
        program = folder / "bin" / name
        program.write_text(
            f"#!{sys.executable} -IS\nimport runpy, sys\nsys.argv[1:1] = [{str(state)!r}, {name!r}]\n"
            f"runpy.run_path({__file__!r}, run_name='__main__')\n"
        )
        program.chmod(0o755)
    (state / "argv").write_text("")
    known = {"installed": list(installed), "held": [], "offered": list(offered), "units": units or {}}
    (state / "state.json").write_text(json.dumps({**known, "devices": devices, "gpgpu": gpgpu}))
    return state


def recorded(state):
    """Every call that changed something: its words."""
    return [json.loads(line) for line in (state / "argv").read_text().splitlines()]


def _listed(state, names):
    rows = [each for each in sorted(state["installed"]) if any(fnmatch.fnmatch(each, name) for name in names)]
    return [f"installed {each}" for each in rows]


READS = {
    ("dpkg-query", ""): _listed,
    ("rpm", ""): _listed,
    ("apt-cache", "policy"): lambda state, names: [
        f"{name}:\n  Installed: (none)\n  Candidate: {'1.0' if name in state['offered'] else '(none)'}"
        for name in names
    ],
    ("dnf", "repoquery"): lambda state, names: [name for name in names if name in state["offered"]],
    ("zypper", "search"): lambda state, names: [
        "S | Name | Summary | Type",
        *(f"  | {name} | x | package" for name in names if name in state["offered"]),
    ],
    ("apt-mark", "showhold"): lambda state, _names: state["held"],
    ("zypper", "locks"): lambda state, _names: state["held"],
    ("systemctl", "is-enabled"): lambda state, names: [state["units"].get(names[0], "")],
    ("dnf", "versionlock"): lambda state, _names: state["held"],
    ("ubuntu-drivers", "devices"): lambda state, _names: [state["devices"]],
    ("ubuntu-drivers", "list"): lambda state, _names: [state["gpgpu"]],
}


def _without(key):
    def change(state, names):
        state[key] = [each for each in state[key] if each not in names]

    return change


def _install(state, names):
    """`ubuntu-drivers install` names none: it takes what it recommends."""
    recommended = [line.split(":")[1].split()[0] for line in state["devices"].splitlines() if "recommended" in line]
    state["installed"] += names or recommended


EDITS = {
    "update": lambda _state, _names: None,
    "install": _install,
    "remove": _without("installed"),
    "hold": lambda state, names: state["held"].extend(names),
    "addlock": lambda state, names: state["held"].extend(names),
    "add": lambda state, names: state["held"].extend(names),
    "delete": _without("held"),
    "unhold": _without("held"),
    "removelock": _without("held"),
    "enable": lambda state, names: state["units"].update({names[0]: "enabled"}),
    "disable": lambda state, names: state["units"].update({names[0]: "disabled"}),
}


def main(folder, program, words):
    """One call of a program."""
    path = Path(folder) / "state.json"
    state = json.loads(path.read_text())
    names = [word for word in words if not word.startswith("-")]
    kind = (program, "" if program in {"dpkg-query", "rpm"} else names[0])
    if kind in READS and names[1:2] not in (["add"], ["delete"]):
        found = READS[kind](state, names if kind[1] == "" else names[1:])
        sys.stdout.write("".join(f"{line}\n" for line in found))
        return
    verb, *things = names[1:] if names[0] == "versionlock" else names
    EDITS[verb](state, things)
    with (Path(folder) / "argv").open("a") as stream:
        stream.write(json.dumps([program, *words]) + "\n")
    path.write_text(json.dumps(state))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

"""`gangline prepare --ansible` on real hosts, with real Ansible: its playbook does what `prepare` does, once."""

import re

import pytest

from tests.ansible_tools import ansible_env, ansible_folder
from tests.lab.test_prepare import differences, snapshot, two, types

__all__ = ["two"]
STEPS = ("names", "limits")
LEFT_BY_ANSIBLE = r".*/\.ansible(/.*)?|/etc/hosts\.\d+\..*~|/etc/hostname\.\d+\..*~"
"""Its folder for modules, and the old contents beside the new ones."""


def plays(lab, tools, folder="playbook", code=0):
    """`ansible-playbook`, and what it counted for each host."""
    argv = ["sh", "-c", f"cd {folder} && exec ansible-playbook -i inventory.yml playbook.yml"]
    done = lab.user.run(argv, env=ansible_env(tools), timeout_s=150)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    rows = re.findall(r"^(\w+) +: (ok=.*)$", done.stdout, re.MULTILINE)
    return {
        host: {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)} for host, row in rows
    }, done.stdout


def others(lab, before):
    """Differences, but for what Ansible leaves."""
    return [row for row in differences(lab.hosts, before) if not re.fullmatch(LEFT_BY_ANSIBLE, row[1])]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_playbook_brings_hosts_where_prepare_brings_them(two, request):
    tools = ansible_folder(request.config.cache)
    before = {host.name: snapshot(host) for host in two.hosts}
    types(two, "prepare", *STEPS, "--yes")
    by_prepare = {host.name: snapshot(host) for host in two.hosts}
    types(two, "prepare", "--undo", "all", "--yes")
    assert differences(two.hosts, before) == []

    types(two, "prepare", *STEPS, "--ansible", "playbook")
    assert differences(two.hosts, before) == []
    lint = ["sh", "-c", "cd playbook && exec ansible-lint --offline --profile production"]
    linted = two.user.run(lint, env=ansible_env(tools), timeout_s=150)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    counted, said = plays(two, tools)
    assert {host: row["changed"] >= 3 for host, row in counted.items()} == {"pc1": True, "pc2": True}, said
    assert others(two, by_prepare) == []
    assert "nothing has to be changed" in types(two, "prepare", *STEPS).stderr
    counted, said = plays(two, tools)
    assert {host: row["changed"] for host, row in counted.items()} == {"pc1": 0, "pc2": 0}, said
    assert others(two, by_prepare) == []

    pc1 = two["pc1"]
    pc1.write("/etc/hosts", "127.0.0.1 localhost mine\n")
    counted, said = plays(two, tools, code=2)
    assert "somebody changed /etc/hosts since" in said
    assert (counted["pc1"]["changed"], counted["pc1"]["failed"]) == (0, 1)
    assert pc1.read("/etc/hosts") == b"127.0.0.1 localhost mine\n"

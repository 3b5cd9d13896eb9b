"""`gangline prepare --commands` on real hosts: its scripts do what `prepare` does, once, and take it back."""

import re

import pytest

from tests.lab.test_prepare import differences, snapshot, two, types

__all__ = ["two"]


def scripts(lab, *words):
    """Host -> its script, brought to it."""
    types(lab, "prepare", *words, "--commands", "scripts")
    for host in lab.hosts:
        host.write("/tmp/prepare.sh", lab.user.read(f"scripts/{host.name}.sh"), 0o600)


def runs(host, *words, code=0):
    done = host.run(["bash", "/tmp/prepare.sh", *words], timeout_s=60)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_scripts_bring_hosts_where_prepare_brings_them(two):
    before = {host.name: snapshot(host) for host in two.hosts}
    types(two, "prepare", "names", "limits", "--yes")
    by_prepare = {host.name: snapshot(host) for host in two.hosts}
    types(two, "prepare", "--undo", "all", "--yes")
    assert differences(two.hosts, before) == []

    scripts(two, "names", "limits")
    assert differences(two.hosts, before) == []
    for host in two.hosts:
        assert "did: hostname" in runs(host)
    assert differences(two.hosts, by_prepare) == []
    assert "nothing has to be changed" in types(two, "prepare", "names", "limits").stderr
    for host in two.hosts:
        assert set(re.findall(r"names: (.*)", runs(host))) == {"nothing to change"}
    assert differences(two.hosts, by_prepare) == []
    for host in two.hosts:
        runs(host, "undo")
    assert differences(two.hosts, before) == []


@pytest.mark.timeout(200)
def test_a_script_changes_nothing_that_is_not_as_it_was_read(two):
    scripts(two, "names")
    pc1, pc2 = two.hosts
    pc1.write("/etc/hosts", "127.0.0.1 localhost mine\n")
    before = {"pc1": snapshot(pc1)}
    said = runs(pc1, code=1)
    assert "/etc/hosts is not as it was read" in said
    assert "nothing was changed" in said
    assert differences([pc1], before) == []

    runs(pc2)
    text = pc2.read("/etc/hosts").decode()
    pc2.write("/etc/hosts", text + "10.0.0.9 other\n")
    said = runs(pc2, "undo", code=1)
    assert "/etc/hosts was changed since and stays" in said
    assert pc2.read("/etc/hosts").decode().endswith("other\n")
    assert pc2.check(["uname", "-n"]).strip() == "debian"


@pytest.mark.timeout(200)
def test_a_step_that_fails_is_taken_back(two):
    scripts(two, "names")
    pc1 = two["pc1"]
    before = {"pc1": snapshot(pc1)}
    pc1.check(["mount", "--bind", "/etc/hosts", "/etc/hosts"], as_root=True)  # no file can be put in its place
    said = runs(pc1, code=1)
    pc1.check(["umount", "/etc/hosts"], as_root=True)
    assert "it failed, and was taken back" in said
    assert differences([pc1], before) == []


def test_a_folder_that_is_there_is_left_alone(two):
    scripts(two, "names")
    refused = types(two, "prepare", "names", "--commands", "scripts", code=2)
    assert "scripts is there already" in refused.stderr

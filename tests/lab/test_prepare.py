"""`gangline prepare` on real hosts: what it shows, changes, proves, records, and takes back."""

import json
import re
import sys

import pytest

COMMAND = (sys.executable, "-m", "gangline.cli.main")
NAMES = ("pc1", "pc2")
SNAPSHOT = """
import base64, json, os, stat, sys
found = {}
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            state = os.lstat(path)
            link = stat.S_ISLNK(state.st_mode)
            data = os.readlink(path) if link else ""
            if stat.S_ISREG(state.st_mode):
                data = base64.b64encode(open(path, "rb").read()).decode()
            xattrs = {n: base64.b64encode(os.getxattr(path, n, follow_symlinks=False)).decode()
                      for n in os.listxattr(path, follow_symlinks=False) if not n.startswith("trusted.")}
            found[path] = [data, stat.filemode(state.st_mode), state.st_uid, state.st_gid, xattrs]
print(json.dumps(found))
"""


def snapshot(host):
    """Content, mode, owner and extended attributes of what is the host's own, and its hostname."""
    tops = (f"{host.home}/.ssh",) if host.name == "desk" else ("/etc", str(host.home), "/home")
    found = json.loads(host.check(["/usr/bin/python3", "-c", SNAPSHOT, *tops], as_root=True))
    return {**found, "hostname": host.check(["uname", "-n"])}


def differences(hosts, before):
    """Paths, by host, that are not as they were."""
    now = {host.name: snapshot(host) for host in hosts}
    return [
        (name, path, before[name].get(path), now[name].get(path))
        for name in now
        for path in sorted(now[name].keys() | before[name].keys())
        if now[name].get(path) != before[name].get(path)
    ]


def types(lab, *words, code=0):
    done = lab.user.run([*COMMAND, *words], timeout_s=90)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def two(lab):
    """Two hosts as an installer leaves them: both are called debian, and mean 127.0.1.1 by it."""
    hosts = lab(2, names=NAMES)
    types(hosts, "init", *NAMES)
    for host in hosts.hosts:
        host.check(["hostname", "debian"], as_root=True)
        host.write("/etc/hostname", "debian\n")
        host.write("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 debian.lan debian\n", 0o664)
    return hosts


@pytest.mark.timeout(300)
def test_names_are_shown_made_and_undone(two):
    before = {host.name: snapshot(host) for host in two.hosts}
    shown = types(two, "prepare", "names")
    assert "+192.168" not in shown.stdout
    assert "nothing was changed; --yes" in shown.stderr
    assert differences(two.hosts, before) == []
    done = types(two, "prepare", "names", "--yes")
    assert "run   hostname pc1" in done.stdout
    assert "-127.0.1.1 debian.lan debian" in done.stdout
    for host in two.hosts:
        assert host.check(["uname", "-n"]).strip() == host.name
        for other in two.hosts:
            first = host.check(["getent", "ahostsv4", other.name]).split()[0]
            assert first == other.address
        assert host.check(["stat", "-c", "%a", "/etc/hosts"]).strip() == "664"
    again = types(two, "prepare", "names", "--yes")
    assert "nothing has to be changed" in again.stderr
    rows = types(two, "prepare", "--status").stdout
    assert len(re.findall(r"names\s+/etc/hosts .*as made", rows)) == 2
    undone = types(two, "prepare", "--undo", "all", "--yes")
    assert "-192.168" not in undone.stderr
    assert differences(two.hosts, before) == []
    assert "no change stands" in types(two, "prepare", "--status").stdout


def test_what_somebody_changed_since_is_refused_and_shown(two):
    types(two, "prepare", "names", "pc1", "--yes")
    pc1 = two["pc1"]
    text = pc1.read("/etc/hosts").decode()
    pc1.write("/etc/hosts", text.replace("pc2", "pc2 other"))
    refused = types(two, "prepare", "--undo", "names", "pc1", "--yes", code=1)
    assert "somebody changed /etc/hosts since" in refused.stderr
    assert "pc2 other" in refused.stdout
    assert pc1.read("/etc/hosts").decode() == text.replace("pc2", "pc2 other")


@pytest.mark.timeout(300)
def test_without_a_step_it_does_what_check_found(two):
    shown = types(two, "prepare")
    assert re.search(r"check found E-NAME-\d+.*: names$", shown.stderr, re.MULTILINE)
    assert re.search(r"^pc1  names  3 changes", shown.stdout, re.MULTILINE)
    ids = set(re.findall(r"E-[A-Z]+-\d+", shown.stderr))
    two.user.write("cluster.yaml", two.user.read("cluster.yaml").decode() + f"acknowledged: {sorted(ids)}\n")
    warned = types(two, "prepare")
    assert "names" not in warned.stdout
    assert "names" in types(two, "prepare", "names").stdout


def test_the_document_for_programs(two):
    done = types(two, "prepare", "names", "--json")
    answer = json.loads(done.stdout)
    assert answer["dry_run"] is True
    assert [row["scope"] for row in answer["hosts"]["pc1"]["names"]["changes"]] == ["root"] * 3


def read_only(host):
    host.check(["mount", "--bind", "/etc", "/etc"], as_root=True)
    host.check(["mount", "-o", "remount,bind,ro", "/etc"], as_root=True)


def full(host):
    host.fill_disk()


def immutable(host):
    done = host.run(["chattr", "+i", "/etc/hosts"], as_root=True)
    if done.returncode:
        pytest.skip(f"this file system has no immutable files: {done.stderr}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [read_only, full, immutable])
def test_a_disk_that_takes_nothing_is_told_and_nothing_is_changed(two, fault):
    pc1 = two["pc1"]
    fault(pc1)
    before = {"pc1": snapshot(pc1)}
    done = types(two, "prepare", "names", "pc1", "--yes", code=1)
    assert "nothing was changed" in done.stderr
    assert differences([pc1], before) == []

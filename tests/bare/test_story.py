"""Three machines out of the shop become a cluster and train; what `prepare` changed is taken back to the last byte."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bare.clocks import CLOCKED, await_refused_step, clock_against_monotonic
from tests.bare.test_bare_lab import LISTEN, reaches
from tests.lab.bare import LEFT_BY_PREPARE, differences
from tests.lab.hosts import lab_folders
from tests.lab.typist import Typist
from tests.lab.user import NewUser, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
GUIDE = Path(__file__).parents[2] / "docs/guides/three-pcs.md"
FIREWALLS = {"pc1": "ufw", "pc2": "firewalld", "pc3": "nftables"}
SSH_CONFIG = "Host {name}\n    HostName {host.address}\n    User {host.login}\n"
WORK_FOLDER = r"/home/alice/gangline(/.*)?"
"""Of gangline: code, models, data and runs."""
JOB = """
name: tiny
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./fox.txt, sequence_length: 64}
batch: 6
micro_batch: 2
steps: 6
"""


def answered(lab, *words, asked="for sudo"):
    """`gangline WORDS`, with the password for the first host and Enter for the others; the screen."""
    with Typist(lab.user, [*GANGLINE, *words]) as screen:
        for number in range(len(FIREWALLS)):
            screen.expect(asked)
            screen.expect(": ")
            screen.type("" if number else lab.hosts[0].password)
        assert screen.end() == 0, screen.text
        assert lab.hosts[0].password not in screen.text
        return screen.text


def out_of_the_shop(lab):
    """Logins by password alone, one wrong name for all, 127.0.1.1, a firewall that lets in nothing but ssh, no key, and a time
    service whose step of the clock is refused."""
    assert not lab.user.exists(".ssh/id_ed25519")
    for host in lab.hosts:
        assert (lab.can_log_in(host), lab.can_log_in(host, key=True)) == (True, False)
        assert not lab.can_log_in(host, login="root")
        assert not host.exists(f"/home/{host.login}/.ssh")
        assert host.check(["hostname"]) == "ubuntu\n"
        assert "127.0.1.1\tubuntu" in host.read("/etc/hosts").decode()
        with host.popen(["python3", "-c", LISTEN], stdout=-1) as server:
            assert server.stdout.readline() == b"listens\n"
            assert [reaches(lab.user, host.address, port) for port in (22, 29500)] == [True, False]
            assert reaches(host, host.address, 29500)
            server.kill()
        await_refused_step(host)


def as_before(lab, before, *, ignore=LEFT_BY_PREPARE):
    """Whether all machines are as they were, to the last byte, attribute and firewall rule."""
    for host in lab.hosts:
        assert differences(before[host.name], host.snapshot(), ignore=ignore) == [], host


def commands_of_the_guide():
    """What docs/guides/three-pcs.md types, from three boxes to a model, without `gangline` and remarks."""
    (block,) = re.findall(r"```\n(gangline prepare access .*?)```", GUIDE.read_text(), re.DOTALL)
    (tuned,) = re.findall(r"stands on the screen; `(gangline export RUN .*?)`", GUIDE.read_text())
    return [line.partition("#")[0].split()[1:] for line in [*block.splitlines(), tuned]]


def describe_python(desk):
    """The Python of the tests in the cluster file: no environment is built without the internet."""
    text = desk.read("cluster.yaml").decode()
    python = f"slots: 1\n    python: {sys.executable}"
    desk.write("cluster.yaml", re.sub(r"slots: 1  # no GPU", python, text))


def test_from_three_bare_machines_to_a_trained_model_and_back(bare, tmp_path):
    access, prepare, check, train, export = commands_of_the_guide()
    assert access == ["prepare", "access", *(f"alice@{name}" for name in FIREWALLS)]
    assert [prepare, check, train[:1]] == [["prepare"], ["check"], ["train"]]
    folders = lab_folders()
    kinds = {name: replace(CLOCKED, firewall=wall, binds=folders, disk="6g") for name, wall in FIREWALLS.items()}
    clock = clock_against_monotonic()
    lab = bare(kinds, ttl_s=2400)
    lab.tell_time(1000.0)
    out_of_the_shop(lab)
    user = NewUser(lab.user)
    user.desk.write(".ssh/config", "".join(SSH_CONFIG.format(name=host.name, host=host) for host in lab.hosts), 0o600)
    before = {host.name: host.snapshot() for host in lab.hosts}

    for round_number in range(2):
        answered(lab, *access, "--yes", asked="for ssh")
        describe_python(user.desk)
        if round_number == 0:
            checked = user.types(*check, code=3)
            assert {"E-NET", "E-NAME"} <= set(re.findall(r"E-[A-Z]+", checked.stdout))
        answered(lab, *prepare, "--yes")
        assert [host.check(["hostname"]).strip() for host in lab.hosts] == list(FIREWALLS)
        if round_number == 0:
            answered(lab, "prepare", "--undo", "all", "--yes")
            as_before(lab, before)
            assert not any(lab.can_log_in(host, key=True) for host in lab.hosts)
            user.desk.check(["rm", "cluster.yaml"])

    lab["pc2"].reboot()
    checked = user.types(*check)
    assert "0 failed" in checked.stdout or "all ok" in checked.stdout, checked.stdout
    user.brings(make_model(tmp_path / "model"), job=JOB)
    user.types("train", "job.yaml", timeout_s=400)
    (run,) = json.loads(user.types("ps", "--json").stdout)["runs"]
    assert run["phase"] == "finished"
    tuned = user.types(*(run["id"] if word == "RUN" else word for word in export), timeout_s=400).stdout.strip()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(lab.user.check(["ls", tuned]).split())

    # with keys between the hosts the head supervises, through their gates
    said = user.types("prepare", "--between-hosts", "--yes")
    assert "pc1 can look after runs; this computer may be off meanwhile" in said.stdout + said.stderr
    trained = user.types("train", "job.yaml", timeout_s=400)
    assert "unattended: yes, pc1 supervises the run" in trained.stdout + trained.stderr
    assert user.types("ps").stdout.count("finished") == 2

    answered(lab, "prepare", "--undo", "all", "--yes")
    as_before(lab, before, ignore=f"{LEFT_BY_PREPARE}|{WORK_FOLDER}")
    assert abs(clock_against_monotonic() - clock) < 1.0, "no clock was set"

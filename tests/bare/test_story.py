"""Three machines out of the shop become a cluster and train; what `prepare` changed is taken back to the last byte."""

import re
import sys

import pytest

from tests.bare.typist import Typist
from tests.lab.bare import LEFT_BY_PREPARE, BareKind, differences
from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
NAMES = ("pc1", "pc2", "pc3")
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


def answered(lab, *words):
    """`gangline WORDS`, with sudo's password for the first host and Enter for the others; the screen."""
    with Typist(lab.user, [*GANGLINE, *words]) as screen:
        for number in range(len(NAMES)):
            screen.expect("for sudo")
            screen.expect(": ")
            screen.type("" if number else lab.hosts[0].password)
        assert screen.end() == 0, screen.text
        return screen.text


def test_from_three_bare_machines_to_a_trained_model_and_back(bare, tmp_path):
    folders = lab_folders()
    kinds = {
        name: BareKind(firewall=wall, binds=folders, disk="6g")
        for name, wall in zip(NAMES, ("ufw", "firewalld", "nftables"), strict=True)
    }
    lab = bare(kinds, ttl_s=1800)
    lab.let_in_by_key()
    user = NewUser(lab.user)
    user.types("init", *NAMES, "--yes")
    text = user.desk.read("cluster.yaml").decode()
    user.desk.write("cluster.yaml", re.sub(r"slots: 1  # no GPU", f"slots: 1\n    python: {sys.executable}", text))

    before = {host.name: host.snapshot() for host in lab.hosts}
    first = user.types("check", code=None)
    assert first.returncode == 3
    assert {"E-NET", "E-NAME"} <= set(re.findall(r"E-[A-Z]+", first.stdout))

    answered(lab, "prepare", "--yes")
    for host in lab.hosts:
        assert host.check(["hostname"]).strip() == host.name
    answered(lab, "prepare", "--undo", "all", "--yes")
    for host in lab.hosts:
        assert differences(before[host.name], host.snapshot(), ignore=LEFT_BY_PREPARE) == [], host

    answered(lab, "prepare", "--yes")
    lab["pc2"].reboot()
    checked = user.types("check")
    assert "0 failed" in checked.stdout or "all ok" in checked.stdout, checked.stdout

    user.brings(make_model(tmp_path / "model"), job=JOB)
    user.types("train", "job.yaml", timeout_s=400)
    assert "finished" in user.types("ps").stdout

    answered(lab, "prepare", "--undo", "all", "--yes")
    for host in lab.hosts:
        left = differences(before[host.name], host.snapshot(), ignore=rf"{LEFT_BY_PREPARE}|{WORK_FOLDER}")
        assert left == [], host

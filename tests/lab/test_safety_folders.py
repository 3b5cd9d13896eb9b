"""A work folder on a disk that others use, too (S11)."""

import pytest

from tests.lab import played_torch
from tests.lab.hosts import Lab
from tests.lab.ordinary import User
from tests.lab.searched import rights

STRANGER = 42043
KINDS = {
    "a link to a folder of the user": 'ln -s "$2/.ssh" /scratch/gangline',
    "a folder of his own": "mkdir -m 755 /scratch/gangline",
    "a link on the way": 'ln -s "$2" /scratch/way',
}


@pytest.fixture(scope="module")
def user():
    """One host with /scratch, where everybody may make something, as in /tmp."""
    with Lab(1) as lab:
        user = User(lab)
        python = played_torch.install(user, lab.hosts)
        lab.hosts[0].check(["mkdir", "-m", "1777", "/scratch"], as_root=True)
        user.check(["gangline", "init", "h0"])
        user.text = user.read("cluster.yaml").replace("slots: 1", f"python: {python}\n    workdir: WORK\n    slots: 1")
        user.write("project/train.py", "print('hello')\n")
        yield user


def run(user, workdir):
    user.write("cluster.yaml", user.text.replace("WORK", workdir))
    return user.run(["gangline", "run", "--dir", "project", "--", "train.py"], timeout_s=100)


@pytest.mark.lab("root")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stranger_has_put_in_its_place_is_refused(user, kind):
    (host,) = user.lab.hosts
    script = f'{KINDS[kind]} && chown -h "$1:$1" /scratch/*'
    host.check(["sh", "-c", script, "stranger", str(STRANGER), str(user.home)], as_root=True)
    before = rights(host, [user.home / ".ssh", "/scratch"])
    done = run(user, "/scratch/way/gangline" if "way" in kind else "/scratch/gangline")
    assert done.returncode == 3, done.stderr
    assert "E-DISK-11" in done.stderr
    assert f"user {STRANGER}" in done.stderr
    assert rights(host, [user.home / ".ssh", "/scratch"]) == before
    host.check(["sh", "-c", "rm -rf /scratch/*"], as_root=True)


def test_one_of_its_own_is_for_nobody_else(user):
    done = run(user, "/scratch/deep/gangline")
    assert done.returncode == 0, done.stderr
    (host,) = user.lab.hosts
    made = {path: mode for mode, _, path in rights(host, ["/scratch"])}
    assert (made["/scratch/deep"], made["/scratch/deep/gangline"]) == ("drwx------", "drwx------")
    assert {mode[4:] for path, mode in made.items() if path != "/scratch"} == {"------"}

"""Accounts, limits and qualities of service that slurmdbd keeps: what gangline says of those that do not exist."""

import json

import pytest

from tests.slurm.cluster import SlurmLab


@pytest.fixture(scope="module")
def one_cluster():
    with SlurmLab(2, accounting=True, ttl_s=600) as lab:
        yield lab


@pytest.mark.parametrize(
    ("keys", "words", "advice"),
    [
        pytest.param(
            {"account": "chemistry"},
            "Invalid account or account/partition combination specified",
            "write it as `slurm.account`",
            id="account",
        ),
        pytest.param({"qos": "platinum"}, "Invalid qos specification", "write it as `slurm.qos`", id="qos"),
    ],
)
def test_what_does_not_exist_is_told_in_slurms_words_and_ours_and_leaves_no_run(account, keys, words, advice):
    account.desk.write("project/loop.py", "")
    account.describes(**keys)
    done = account.types("run", "--detach", "--dir", "project", "--", "loop.py", code=None)
    assert done.returncode == 1
    assert words in done.stderr
    assert advice in done.stderr
    assert json.loads(account.types("ps", "--json").stdout)["runs"] == []
    assert account.desk.run(["ls", ".gangline/runs"]).stdout == ""
    assert account.lab.jobs() == []


def test_a_run_that_its_qos_holds_back_says_so(account):
    run = account.runs(account="physics", qos="short")  # one node at a time
    row = account.awaits(run, lambda row: row["waits"], "a reason")
    assert row["phase"] == "queued"
    assert "QOS" in row["waits"]
    account.types("stop", run)


def test_init_writes_the_account_that_the_user_has(account):
    account.types("init", "--slurm", "--output", "mine.yaml")
    assert "account: physics" in account.desk.read("mine.yaml").decode()

"""Three commands to a running job on three hosts with different numbers of ranks; then everything that can happen to it."""

import json
import re

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser, make_model, processes_of_runs

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def describe(user, hosts):
    """`init`, then what the lab needs beside it: a slot more on the first host, and the venv of the tests."""
    user.describes(*(host.name for host in hosts))
    user.desk.write("cluster.yaml", user.desk.read("cluster.yaml").decode().replace("slots: 1", "slots: 2", 1))


@pytest.mark.parametrize(
    "meshed",
    [pytest.param(True, id="kept_by_the_head"), pytest.param(False, id="kept_by_the_desk", marks=pytest.mark.slow)],
)
def test_a_job_on_three_hosts_lives_through_what_happens_to_it(lab, model, meshed):
    made = lab(3, binds=lab_folders(), meshed=meshed, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(model)
    describe(user, made.hosts)
    checked = user.types("check")
    assert "0 failed" in checked.stdout or "all ok" in checked.stdout

    started = user.types("train", "job.yaml", "--detach")
    run = started.stdout.strip()
    assert ("unattended: no" in started.stderr) is not meshed
    user.awaits(run, lambda row: (row["step"] or 0) > 5, "it trains")

    # the user's computer loses everything it has of it; the job does not notice
    keeper = made.hosts[0] if meshed else made.user
    records = f"{'gangline' if meshed else '.local/state/gangline'}/runs/{run}/state.json"
    keeper.run(["kill", "-9", str(json.loads(keeper.read(records))["supervisor"]["pid"])])
    before = user.row(run)["step"]
    user.awaits(run, lambda row: row["step"] > before, "it trains without its supervisor")
    assert user.types("resume", run, code=None).returncode == 2  # no second launch

    user.types("stop", run)
    row = user.row(run)
    assert row["phase"] == "stopped"
    assert [line for host in (*made.hosts, made.user) for line in processes_of_runs(host)] == []
    logs = user.types("logs", run).stdout
    assert all(name in logs for name in ("h0 rank 0", "h0 rank 1", "h1 rank 2", "h2 rank 3"))

    user.desk.write("two.yaml", without_host(user.desk.read("cluster.yaml").decode(), "h1"))
    resumed = user.types("resume", run, "--cluster", "two.yaml", "--detach")
    assert "from step" in resumed.stderr
    user.awaits(run, lambda now: now["step"] > row["step"], "it goes on with two hosts")
    user.types("stop", run)
    assert [line for host in (*made.hosts, made.user) for line in processes_of_runs(host)] == []

    folder = user.types("export", run).stdout.strip()
    assert "adapter_model.safetensors" in made.user.run(["ls", folder]).stdout


def without_host(text, name):
    """A cluster file with one host less."""
    return re.sub(rf"  - name: {name}\n(    .*\n)+", "", text)

"""Plug-ins that are installed on the user's computer alone: a strategy, a backend and an exporter on three hosts that
have never had them.
"""

import json
import sys

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import JOB, NewUser, make_model, processes_of_runs
from tests.packages import install_examples

pytestmark = pytest.mark.timeout(420)

PLUGGED = (
    JOB.replace("method: {kind: lora, rank: 4}", "method: full\nstrategy: averaging")
    .replace("steps: 400", "steps: 3")
    .replace("batch: 12", "batch: 6")
    + "report: {csv: true}\n"
)
MODULES = ("gangline_averaging", "gangline_averaging_train", "gangline_csv", "gangline_one_by_one")
SITE = "plug-ins"
"""In the home folder of the user's computer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return install_examples(tmp_path_factory.mktemp("packages"), "strategy", "backend", "exporter")


def installs(user, packages):
    for path in packages.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            user.desk.write(f"{SITE}/{path.relative_to(packages)}", path.read_bytes())
    user.desk.env["PYTHONPATH"] = str(user.desk.home / SITE)


def test_plug_ins_of_the_users_computer_train_and_write_on_hosts_that_have_never_had_them(lab, model, packages):
    made = lab(3, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(model, job=PLUGGED)
    installs(user, packages)
    user.describes(*(host.name for host in made.hosts), more="\nbackend: one-by-one\n")
    for host in made.hosts:
        found = f"import importlib.util as u; print([n for n in {MODULES} if u.find_spec(n)])"
        assert host.check([sys.executable, "-c", found]).strip() == "[]"

    run = user.types("train", "job.yaml", "--detach").stdout.strip()
    row = user.awaits(run, lambda row: row["phase"] not in {"starting", "running"}, "it trains")
    assert (row["phase"], row["step"]) == ("finished", 3)

    head = made.hosts[0]
    folder = f"gangline/runs/{run}"
    assert json.loads(head.read(f"{folder}/plan.json"))["strategy"] == "averaging"
    assert json.loads(head.read(f"{folder}/attempts/1/request.json"))["backend"] == "one-by-one"
    written = [line.split(",") for line in head.read(f"{folder}/metrics.csv").decode().splitlines()]
    assert [int(step) for _, step, name, _ in written if name == "train/loss"] == [1, 2, 3]
    for host in made.hosts:
        assert processes_of_runs(host) == []

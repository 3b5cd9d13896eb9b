"""Runs on nodes that see nothing of the login host: neither its home nor gangline's source."""

import pytest

from tests.lab.settings import ROOT
from tests.lab.user import make_model
from tests.slurm.cluster import SlurmLab
from tests.slurm.test_slurm_runs import ENDLESS
from tests.slurm.user import Account

pytestmark = pytest.mark.timeout(600)


class Stranger(Account):
    """An account whose nodes share nothing with the login host."""

    def describes(self, **keys: object) -> None:
        super().describes(**{"shared_home": False, "workdir": "~/work", **keys})

    def log_of(self, run: str) -> str:
        """What the batch step wrote, on its node."""
        words = ["sh", "-c", f"cat work/.controller/runs/{run}/slurm-*.log"]
        return "\n".join(node.run(words).stdout for node in self.lab.nodes if node.is_alive)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_cluster():
    with SlurmLab(3, shared=False, ttl_s=1800) as lab:
        for node in lab.nodes:
            node.check(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", f"{ROOT}/src"])
        yield lab


@pytest.fixture
def account(one_cluster):
    yield Stranger(one_cluster)
    one_cluster.cancel_all()
    assert one_cluster.left() == []


def test_a_script_runs_to_its_end_on_nodes_that_share_nothing(account):
    run = account.runs(steps=20)
    account.types("attach", run)
    assert account.row(run)["phase"] == "finished", account.log_of(run)
    account.leaves_nothing()
    assert account.types("logs", run).stdout.count("step 19") == 2  # by short jobs on the nodes
    assert account.desk.run(["ls", "work"]).returncode != 0


@pytest.mark.slow
def test_the_model_of_a_run_that_has_ended_there_is_exported(account, model):
    run = account.trains(model, job=ENDLESS.replace("steps: 100000", "steps: 20"))
    assert account.awaits_phase(run, "finished", "failed", patience_s=240)["phase"] == "finished", account.log_of(run)
    account.leaves_nothing()
    account.types("export", run, "--to", "tuned")
    assert "adapter_model.safetensors" in account.desk.check(["ls", "tuned"])


@pytest.mark.slow
def test_a_training_run_there_is_followed_stopped_and_resumed_on_its_nodes(account, model):
    run = account.trains(model, job=ENDLESS)
    before = account.awaits_step(run, 25)["step"]
    assert "step" in account.types("logs", run).stdout
    nodes = account.lab.shown(account.job_of(run))["NodeList"]
    account.types("stop", run)
    assert account.row(run)["phase"] == "stopped", account.log_of(run)
    account.leaves_nothing()
    account.types("resume", run, "--detach")
    row = account.awaits(run, lambda row: row["attempt"] == 2 and (row["step"] or 0) > before, "more steps")
    assert row["error"] is None
    assert account.lab.shown(account.job_of(run))["NodeList"] == nodes
    account.types("stop", run)
    account.leaves_nothing()

"""The guide of docs/slurm.md and the example for Slurm, typed by somebody with an account. The GPUs are simulated."""

import json
import shlex
from pathlib import Path

import pytest

from tests.lab.user import JOB, TEXT, make_model
from tests.slurm.user import Account

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "slurm_llama70b"
IN_SMALL = ("model=./tiny-model", "steps=4", "schedule.warmup_steps=1", "batch=4", "data.sequence_length=64")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def commands(page, heading):
    """The command lines of the first block below a heading."""
    block = page.partition(f"## {heading}\n")[2].partition("```sh\n")[2].partition("```")[0]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_guide_leads_from_login_to_a_tuned_model(slurm, model):
    account = Account(slurm(2, gpus=1, gpu_type="a100-80gb", ttl_s=1800))
    account.brings(model, job=JOB.replace("steps: 400", "steps: 20"))
    run, said = "", {}
    lines = commands((ROOT / "docs/slurm.md").read_text(encoding="utf-8"), "From login to a tuned model")
    assert len(lines) == 9
    for program, *words in lines:
        assert program == "gangline"
        done = account.types(*(run if word == "RUN" else word for word in words), timeout_s=280)
        said[words[0]] = done.stdout + done.stderr
        if "--detach" in words:
            run = done.stdout.split()[-1]
    assert "partition" in said["plan"]
    assert "allocation" in said["plan"]
    assert run in said["ps"]
    assert "finished" in said["attach"]
    assert "adapter_model.safetensors" in account.desk.check(["ls", "tuned"])
    account.leaves_nothing()


def test_the_example_of_four_nodes_is_planned_and_runs_in_small(slurm, model):
    lab = slurm(4, gpus=8, cpus=64, partitions=["gpu MaxTime=2-00:00:00"], scratch=True, ttl_s=1800)
    account = Account(lab)
    for path in EXAMPLE.iterdir():
        account.desk.write(path.name, path.read_bytes())
    for path in model.iterdir():
        account.desk.write(f"tiny-model/{path.name}", path.read_bytes())
    plan = account.types("plan", "job.yaml").stdout
    assert "4 nodes with 64 cores" in plan
    assert "#SBATCH --nodes=4" in account.types("train", "job.yaml", "--dry-run").stdout
    account.desk.write("pages.jsonl", json.dumps({"text": TEXT[:4000]}) + "\n")
    account.types("train", "job.yaml", *IN_SMALL, "--cluster", "small.yaml", "--detach")
    run = account.newest()
    row = account.awaits_phase(run, "finished", "failed", patience_s=280)
    assert (row["phase"], row["step"]) == ("finished", 4), account.log_of(run)
    assert len(account.desk.check(["sh", "-c", f"ls -d /scratch/ada/gangline/n*/runs/{run}"]).split()) == 2
    account.leaves_nothing()

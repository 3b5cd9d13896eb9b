"""Words that Slurm's programs, bash and Python take: each run by the real one, without Slurm."""

import subprocess
import sys

import pytest

from gangline.control.slurm_job import script
from gangline.errors import HostUnreachable, UsageError
from gangline.launch import slurm
from gangline.runs.cluster import SlurmRequest
from gangline.runs.layout import RunLayout
from gangline.transport import slurm_commands


def test_a_program_that_is_missing_is_named():
    with pytest.raises(UsageError, match=r"gangline-no-such-program is not on this computer"):
        slurm_commands.slurm("gangline-no-such-program")


def test_a_controller_that_hangs_costs_its_time_limit():
    with pytest.raises(HostUnreachable, match=r"Slurm does not answer: sleep"):
        slurm_commands.slurm("sleep", "30", timeout_s=0.2)


def test_srun_starts_the_agent_in_the_folder_of_its_node(tmp_path):
    (tmp_path / "agent.pyz").write_text("import sys; print(sys.argv[1:])")
    words = [sys.executable, "-c", slurm.PICK, "n0", "/nowhere", "n1", str(tmp_path)]
    done = subprocess.run(words, env={"SLURMD_NODENAME": "n1"}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(["foreground", "step", str(tmp_path)])


def test_the_batch_script_is_bash_whatever_its_folder_is_called(tmp_path):
    layout = RunLayout(tmp_path / "ada's home; $(touch x)", "calm-otter-7")
    asked = SlurmRequest(nodes=2, options=("--comment='a b' $HOME",))
    text = script(layout, asked, name="tiny")
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    said = subprocess.run(
        ["bash"], input=text.replace("exec ", "printf '%s\\n' ").encode(), capture_output=True, check=True, cwd=tmp_path
    )
    assert said.stdout.decode().splitlines()[-1] == str(layout.folder)
    assert list(tmp_path.iterdir()) == []

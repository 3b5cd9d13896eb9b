"""The batch script that brings a run to nodes that do not see gangline's home."""

import io
import json
import tarfile

import pytest

from gangline.control import packed_run
from gangline.control.packed_run import packed, reads_folder, script_lines, take_over
from gangline.control.slurm_job import script
from gangline.control.user_command import CommandRecord
from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, SlurmRequest
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState
from gangline.supervise.allocation import SlurmRecord

ASKED = SlurmRequest(nodes=2, shared_home=False, workdir="~/a folder", notice_s=90)
CLUSTER = Cluster(name="campus", hosts=(), backend="slurm", slurm=ASKED)


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "home", "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase="queued").save(layout)
    SlurmRecord(job="", submitted="", cluster=CLUSTER).save(layout.slurm)
    return layout


@pytest.fixture
def without_program(monkeypatch):
    """Packing gangline itself takes over a second; one test does."""
    monkeypatch.setattr(packed_run, "source_files", lambda _packages: {})


def a_job(tmp_path):
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "fox.txt").write_text("fox\n")
    data = DataJob(train=SourceJob(files=(str(tmp_path / "fox.txt"), "/only/on/nodes.txt")))
    return Job(name="tiny", model=ModelJob(path=str(model)), data=data, batch=4, micro_batch=1)


def members(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() if member.isfile() else None for member in tar}


def unpack(archive, home, run_id):
    """What the script does on the node."""
    for name, data in members(archive).items():
        kind, _, rest = name.partition("/")
        place = {"run": home / "runs" / run_id, "reads": home / "reads" / run_id, "code": home / "code" / run_id}[kind]
        (place / rest).parent.mkdir(parents=True, exist_ok=True)
        (place / rest).write_bytes(data or b"")


def test_the_archive_has_the_program_the_records_and_what_the_job_reads_here(tmp_path, layout):
    a_job(tmp_path).save(layout.job)
    found = members(packed(layout))
    assert {"code/gangline/batch_step.py", "code/gangline/catalog/gpus.json"} <= set(found)
    assert {"run/job.json", "run/slurm.json", "run/state.json"} <= set(found)
    assert list(found)[-1] == "run/state.json"  # a node that has it has all of it
    assert found["reads/model/model.safetensors"] == b"weights"
    assert found["reads/0/fox.txt"] == b"fox\n"
    assert not any("nodes.txt" in name for name in found)


@pytest.mark.usefixtures("without_program")
def test_on_the_node_the_job_reads_what_was_brought(tmp_path, layout):
    a_job(tmp_path).save(layout.job)
    home = tmp_path / "node" / ".controller"
    unpack(packed(layout), home, layout.run_id)
    there = RunLayout(home, layout.run_id)
    take_over(there, "41")
    job, reads = Job.load(there.job), reads_folder(there)
    assert job.model.path == str(reads / "model")
    assert job.data.train.files == (str(reads / "0/fox.txt"), "/only/on/nodes.txt")
    record = SlurmRecord.of(there)
    assert (record.job, record.read) == ("41", "41")
    take_over(there, "41")  # a second time: nothing is left to do
    assert Job.load(there.job) == job


@pytest.mark.usefixtures("without_program")
def test_the_folder_of_a_command_is_brought_without_secrets(tmp_path, layout):
    project = tmp_path / "project"
    project.mkdir()
    (project / "loop.py").write_text("print('hello')")
    (project / ".env").write_text("HF_TOKEN=hf_canary")
    CommandRecord(words=("loop.py",), resume_words=None, folder=str(project), project={}).save(layout.command)
    archive = packed(layout)
    assert b"hf_canary" not in b"".join(filter(None, members(archive).values()))
    home = tmp_path / "node"
    unpack(archive, home, layout.run_id)
    there = RunLayout(home, layout.run_id)
    take_over(there, "41")
    folder = tmp_path / "node/reads/calm-otter-7/project"
    assert CommandRecord.of(there).folder == str(folder)
    assert (folder / "loop.py").read_text() == "print('hello')"


def test_the_script_is_not_requeued_by_slurm_and_needs_no_folder_of_the_login_host(layout):
    text = script(layout, ASKED, name="tiny", archive=b"archive")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--no-requeue", "--chdir=/", "--output=/dev/null", "--signal=B:USR1@90"} <= set(options)
    assert str(layout.root) not in text
    assert "controller=\"$HOME\"/'a folder'/.controller" in text
    assert text.splitlines()[-2:] == ["YXJjaGl2ZQ==", packed_run.END_OF_ARCHIVE]


@pytest.mark.usefixtures("without_program")
def test_a_run_that_slurm_would_refuse_as_too_large_is_refused_before(tmp_path, layout, monkeypatch):
    with pytest.raises(UsageError, match=r"too large for a batch script") as caught:
        script_lines(layout, ASKED, b"x" * packed_run.SCRIPT_BYTES)
    assert "disks of the nodes" in caught.value.fix
    monkeypatch.setattr(packed_run, "READS_BYTES", 3)
    a_job(tmp_path).save(layout.job)
    with pytest.raises(UsageError, match=r"too large for a batch script"):
        packed(layout)


def test_what_unpacks_it_is_python_and_leaves_newer_records_alone():
    compile(packed_run.UNPACK, "unpack", "exec")
    assert "state.json" in packed_run.UNPACK
    assert json.dumps("gangline.batch_step") in packed_run.UNPACK

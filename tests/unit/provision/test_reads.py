"""What a job reads: the model on every host and data on the head, by content, in place where it is there already."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline.errors import DataError, ModelError
from gangline.provision import inputs
from gangline.provision.environment import wrapped
from gangline.provision.inputs import Reads, bring_reads, model_files
from gangline.runs.cluster import Cluster, Environment
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from tests.unit.provision.hosts import HostTransport, Lines, kennel

IN_PLACE = inputs._in_place


@pytest.fixture(autouse=True)
def nothing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of these tests see the paths of this computer, as no real host does."""
    monkeypatch.setattr(inputs, "_in_place", lambda *_words, **_options: {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "me" / "tiny model"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("url")
    (folder / "model.gguf").write_text("for another program")
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "me" / "corpus.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "x"}\n')
    return path


def job_of(model: Path | str, *files: Path, **options: object) -> Job:
    data = DataJob(train=SourceJob(files=tuple(map(str, files))))
    return Job(name="j", model=ModelJob(path=str(model), **options), data=data, batch=1, micro_batch=1)


def bring(job: Job, cluster: Cluster, transports: dict[str, HostTransport], tmp_path: Path, **options: object) -> Reads:
    return bring_reads(job, cluster, transports, home=tmp_path / "home", **options)


def test_every_host_gets_the_model_and_the_head_the_data(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    lines = Lines()
    found = bring(job_of(model, corpus), cluster, transports, tmp_path, console=lines)
    for host in cluster.hosts:
        there = Path(found.models[host.name])
        assert there.parent == Path(host.workdir) / "models"
        assert there.name.startswith("tiny-model-")
        assert {path.name for path in there.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert Path(found.data[str(corpus)]).read_text() == corpus.read_text()
    assert found.data[str(corpus)].startswith(f"{cluster.head.workdir}/inputs/")
    assert not (tmp_path / "pc2" / "inputs").exists()
    assert lines.said == [
        "copied model tiny model from this computer to pc1, pc2",
        "copied data corpus.jsonl from this computer to pc1",
    ]


def test_the_files_of_every_source_are_brought_and_read_where_they_lie(
    tmp_path: Path, model: Path, corpus: Path
) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    more = corpus.with_name("more.csv")
    more.write_text("text\nx\n")
    job = job_of(model)
    mix = SourceJob(mix=(SourceJob(hub="a/b"), *(SourceJob(files=(str(file),), weight=2.0) for file in (corpus, more))))
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, train=mix))
    found = bring(job, cluster, transports, tmp_path)
    there = found.localised(job, cluster.head).data.train
    assert there.all_files == tuple(found.data[str(file)] for file in (corpus, more))
    assert Path(there.all_files[1]).read_text() == more.read_text()
    assert [(part.hub, part.weight) for part in there.parts] == [("a/b", 1.0), (None, 2.0), (None, 2.0)]


def test_an_address_is_left_to_the_head(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    job = job_of(model)
    source = dataclasses.replace(job.data.train, files=(str(corpus), "s3://kennel/rows.jsonl"))
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, train=source))
    found = bring(job, cluster, transports, tmp_path)
    assert found.localised(job, cluster.head).data.train.files == (found.data[str(corpus)], "s3://kennel/rows.jsonl")


def test_what_is_there_is_not_brought_again(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    first = bring(job_of(model, corpus), cluster, transports, tmp_path)
    for transport in transports.values():
        transport.pushed.clear()
    assert bring(job_of(model, corpus), cluster, transports, tmp_path) == first
    assert [transport.pushed for transport in transports.values()] == [[], []]


def test_a_host_that_has_the_same_path_with_the_same_content_uses_it(
    tmp_path: Path, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_in_place", IN_PLACE)
    cluster, transports = kennel(tmp_path, "same", "other")
    transports["other"] = OtherTransport(cluster.hosts[1])
    found = bring(job_of(model, corpus), cluster, transports, tmp_path)
    assert found.models["same"] == str(model)
    assert found.data == {str(corpus): str(corpus)}
    assert found.models["other"].startswith(f"{tmp_path}/other/models/tiny-model-")
    assert transports["same"].pushed == []


class OtherTransport(HostTransport):
    """A host that holds something else at the paths of the user's computer."""

    def run(self, argv, *, on_line=None, **options):
        def hear(line: str) -> None:
            record = json.loads(line)
            for path, found in record.get("folders", {}).items():
                if "/me/" in path:
                    found["tree"] = "0" * 64
            on_line(json.dumps(record))

        return super().run(argv, on_line=on_line and hear, **options)


def test_hosts_on_this_computer_read_it_where_it_is(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", transport="local")
    assert bring(job_of(model, corpus), cluster, transports, tmp_path) == Reads()
    assert transports["pc1"].ran == []


def test_names_of_the_hub_stay_as_they_are(tmp_path: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    assert bring(job_of("someone/tiny", corpus), cluster, transports, tmp_path).models == {}


def test_a_model_that_starts_at_random_needs_no_weights_there(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    found = bring(job_of(model, corpus, start="random"), cluster, transports, tmp_path)
    assert {path.name for path in Path(found.models["pc1"]).iterdir()} == {"config.json", "tokenizer.json"}


def test_changed_weights_are_another_model(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    first = bring(job_of(model, corpus), cluster, transports, tmp_path)
    (model / "model.safetensors").write_text("trained on")
    second = bring(job_of(model, corpus), cluster, transports, tmp_path)
    assert first.models["pc1"] != second.models["pc1"]
    assert (Path(first.models["pc1"]) / "model.safetensors").read_text() == "model.safetensors"


def test_a_flipped_byte_on_a_host_is_put_right(tmp_path: Path, model: Path, corpus: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    there = Path(bring(job_of(model, corpus), cluster, transports, tmp_path).models["pc1"])
    (there / "model.safetensors").write_text("model.safetensorz")
    bring(job_of(model, corpus), cluster, transports, tmp_path)
    assert (there / "model.safetensors").read_text() == "model.safetensors"


def test_the_hubs_cache_is_brought_as_files(tmp_path: Path, corpus: Path) -> None:
    cache = tmp_path / "me" / "models--x--tiny"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "abc").write_text("weights")
    snapshot = cache / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").write_text("{}")
    cluster, transports = kennel(tmp_path, "pc1")
    there = Path(bring(job_of(snapshot, corpus), cluster, transports, tmp_path).models["pc1"])
    assert (there / "model.safetensors").read_text() == "weights"
    assert not (there / "model.safetensors").is_symlink()


def test_a_link_that_leads_out_of_the_model_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "id_ed25519").write_text("canary")
    (model / "extra.json").symlink_to(tmp_path / "id_ed25519")
    with pytest.raises(ModelError, match=r"extra\.json is a link that leads out of the model's folder"):
        model_files(model)


def test_secrets_in_a_models_folder_stay_here(model: Path) -> None:
    for name in (".env", "server.pem", "id_rsa", ".netrc"):
        (model / name).write_text("canary")
    (model / "notes.txt").write_text("-----BEGIN PRIVATE KEY-----\ncanary")
    assert set(model_files(model)) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_no_room_on_a_host_is_told_before_anything_is_copied(
    tmp_path: Path, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gangline.provision import relay

    real = relay.look_everywhere
    full = lambda *words, **options: [dataclasses.replace(tree, free_bytes=3) for tree in real(*words, **options)]  # noqa: E731
    monkeypatch.setattr(relay, "look_everywhere", full)
    cluster, transports = kennel(tmp_path, "pc1")
    with pytest.raises(ModelError, match="pc1: no room for model tiny model") as caught:
        bring(job_of(model, corpus), cluster, transports, tmp_path)
    assert "42 B are to be written" in caught.value.seen
    assert transports["pc1"].pushed == []


def test_every_host_reads_the_job_in_its_own_words(tmp_path: Path) -> None:
    cluster, _ = kennel(tmp_path, "pc1", "pc2")
    source = SourceJob(files=("/me/a.jsonl", "/me/b.jsonl"))
    data = DataJob(train=source, evaluation=source)
    job = Job(name="j", model=ModelJob(path="/me/model"), data=data, batch=1, micro_batch=1)
    found = Reads(models={"pc2": "/w/models/m"}, data={"/me/b.jsonl": "/w/inputs/b.jsonl"})
    first, second = (found.localised(job, host) for host in cluster.hosts)
    assert (first.model.path, second.model.path) == ("/me/model", "/w/models/m")
    assert first.data.train.files == ("/me/a.jsonl", "/w/inputs/b.jsonl")
    assert first.data.evaluation == first.data.train
    assert job.model.path == "/me/model"


def test_an_image_sees_the_model_that_is_used_where_it_is(tmp_path: Path) -> None:
    image = Environment(kind="apptainer", path="/images/train.sif")
    cluster, _ = kennel(tmp_path, "pc1", "pc2", environment=image)
    cluster = dataclasses.replace(cluster, hosts=tuple(map(wrapped, cluster.hosts)))
    own = f"{tmp_path}/pc2/models/m"
    one, other = Reads(models={"pc1": "/data/m", "pc2": own}).seen_from(cluster, job_of("/me/m")).hosts
    assert one.prefix[:4] == ("apptainer", "exec", "--bind", "/data/m")
    assert other == cluster.hosts[1]
    assert Reads().seen_from(cluster, job_of("someone/tiny")) == cluster


def test_an_error_of_the_head_names_the_users_file_not_its_copy() -> None:
    found = Reads(data={"/me/rows.jsonl": "/w/inputs/3d2c/rows.jsonl"})
    with pytest.raises(DataError) as caught, found.named_as_here():
        raise DataError("data.train: 1 row:\n  /w/inputs/3d2c/rows.jsonl:7: bad", seen="/w/inputs/3d2c/rows.jsonl")
    assert caught.value.what == "data.train: 1 row:\n  /me/rows.jsonl:7: bad"
    assert caught.value.seen == "/me/rows.jsonl"
    assert found.named("/w/inputs/3d2c/rows.jsonl:9: empty") == "/me/rows.jsonl:9: empty"

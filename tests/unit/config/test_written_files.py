"""The schemas and the reference in the repository are those that the words give, and they say the truth."""

import re
from pathlib import Path

import pytest

from gangline.config.document import parse_hostfile, read_document
from gangline.config.load import load_cluster, load_job
from gangline.config.reference import cluster_schema, job_schema, written_files
from gangline.runs.cluster import Host

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```(yaml|text)\n(.*?)```", re.DOTALL)
jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize("name", written_files(ROOT))
def test_up_to_date(name):
    fix = "run: python -m gangline.config.reference ."
    assert (ROOT / name).read_text(encoding="utf-8") == written_files(ROOT)[name], fix


@pytest.mark.parametrize("schema", [job_schema(), cluster_schema()], ids=["job", "cluster"])
def test_schemas_are_schemas(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("schema", [job_schema(), cluster_schema()], ids=["job", "cluster"])
def test_every_key_says_what_it_is_for(schema):
    sections = [schema, *schema["$defs"].values()]
    without = [
        key
        for section in sections
        for key, field in section["properties"].items()
        if not (field.get("description") or "$ref" in field)
    ]
    assert without == []


GOOD = [
    "model: ./llama\ndata: {train: rows.jsonl}\nbatch: 8\n",
    "model: ./llama\nmethod: lora\nschedule: linear\nprecision: bf16\ndata: {train: [a, b], eval: 0.1}\nbatch: 8\n",
    "model: {path: ./llama}\nmethod: {targets: q_proj}\ndata: {train: {hub: a/b}, eval: none}\nbatch: 8\n",
]
BAD = ["model: 5\ndata: {train: x}\nbatch: 8\n", "model: x\ndata: {train: x}\nbatch: 8\nlr: 1\n", "method: lroa\n"]


@pytest.mark.parametrize("text", GOOD)
def test_editors_accept_what_is_good(text):
    jsonschema.validate(read_document(text, "job.yaml").values, job_schema())


@pytest.mark.parametrize("text", BAD)
def test_editors_mark_what_is_bad(text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(read_document(text, "job.yaml").values, job_schema())


def test_the_examples_of_the_reference_can_be_loaded(tmp_path):
    for name in ("llama/config.json", "data/train.jsonl", "data/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    blocks = {name: BLOCK.findall(written_files(ROOT)[f"docs/{name}.md"]) for name in ("job", "cluster")}
    (tmp_path / "job.yaml").write_text(blocks["job"][0][1])
    assert load_job(tmp_path / "job.yaml").batch == 32
    (tmp_path / "cluster.yaml").write_text(blocks["cluster"][0][1])
    hosts = load_cluster(tmp_path / "cluster.yaml", home=tmp_path).hosts
    assert [host.share for host in hosts] == [3, 2, 1]
    hostfile = next(block for kind, block in blocks["cluster"] if kind == "text")
    assert parse_hostfile(hostfile, "hostfile").values["hosts"][0]["slots"] == 2


def test_every_field_of_a_host_has_a_key():
    renamed = {"ssh_port": "port"}
    found_out = {"prefix", "code", "allocation", "job_options"}
    fields = {renamed.get(name, name) for name in Host.__dataclass_fields__} - found_out
    assert fields == set(cluster_schema()["$defs"]["HostWords"]["properties"])

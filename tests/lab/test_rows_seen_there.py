"""Rows that are first seen on a host, over ssh: their tokens, or because they lie there."""

import json

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import JOB, NewUser, make_model, processes_of_runs

pytestmark = pytest.mark.timeout(420)

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
)
ROWS = JOB.replace("train: ./fox.txt", "train: ./rows.jsonl, format: chat, chat_template: ./strict.jinja")
NO_PACKAGES = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "transformers" else find_spec(name, *more)
"""
TALK = [{"role": "user", "content": "how many dogs?"}, {"role": "assistant", "content": "six"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_row_that_the_template_refuses_is_named_from_the_host_and_no_run_is_left(lab, model):
    made = lab(2, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(model, job=ROWS)
    user.desk.write("strict.jinja", STRICT)
    talks = [TALK] * 9 + [[{"role": "system", "content": "be kind"}, *TALK]]
    user.desk.write("rows.jsonl", "".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    user.desk.write("bare/sitecustomize.py", NO_PACKAGES)
    user.desk.env["PYTHONPATH"] = str(user.desk.home / "bare")
    user.describes(*(host.name for host in made.hosts))

    planned = user.types("plan", "job.yaml").stdout
    assert "data.train: 10 looked at, all can be used" in planned
    assert "tokens     not looked at: no Python of this computer has the packages" in planned
    refused = user.types("train", "job.yaml", code=2).stderr
    assert f"{user.desk.home}/rows.jsonl:10: the chat template refuses the messages: 'no system role'" in refused
    assert "/inputs/" not in refused  # where the copy lies on the host helps nobody
    assert "no runs" in user.types("ps").stdout
    assert [line for host in (*made.hosts, made.user) for line in processes_of_runs(host)] == []


def test_a_row_that_lies_on_a_host_is_named_with_it_and_its_good_rows_are_seen_there(lab, model):
    made = lab(2, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    there = made.hosts[1]
    rows = [json.dumps({"prompt": "dogs", "completion": text}) for text in ("six", "")]
    there.write("data/a.jsonl", rows[0] + "\n")
    there.write("data/b.jsonl", "\n".join(rows) + "\n")
    user.brings(model, job=JOB.replace("train: ./fox.txt", f"train: '{there.name}:~/data/*.jsonl', format: completion"))
    user.types("init", *(host.name for host in made.hosts), "--yes")
    refused = user.types("train", "job.yaml", code=2).stderr
    assert f"{there.name}:{there.home}/data/b.jsonl:2: " in refused
    assert "1 of 3 rows cannot be used" in refused
    assert "no runs" in user.types("ps").stdout
    there.write("data/b.jsonl", rows[0] + "\n")
    assert "data.train: 2 looked at, all can be used" in user.types("plan", "job.yaml").stdout
    unknown = user.types("plan", "job.yaml", "data.train=pc9:/a.jsonl", code=2).stderr
    assert "files of pc9, which is no host of the cluster" in unknown

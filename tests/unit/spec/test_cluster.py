"""What cluster.yaml means."""

import json
import os
import socket
import sys

import pytest

from gangline.errors import SpecError
from gangline.runs.cluster import Cluster, Host
from gangline.spec.load import load_cluster


def load(folder, text, *overrides, name="cluster.yaml"):
    (folder / name).write_text(text, encoding="utf-8")
    return load_cluster(folder / name, overrides, home=folder / "home")


def test_without_a_file_there_is_this_computer(tmp_path):
    cluster = load_cluster(None, home=tmp_path)
    assert cluster == Cluster(name="local", hosts=(Host(name="local", workdir=str(tmp_path), python=sys.executable),))


def test_without_a_file_overrides_count(tmp_path):
    cluster = load_cluster(None, ["hosts.local.slots=3", "hosts.0.env.A=007"], home=tmp_path)
    assert (cluster.head.slots, cluster.head.env, cluster.head.workdir) == (3, {"A": "007"}, str(tmp_path))


SEVERAL = """\
name: home
hosts:
  - {name: pc1, transport: local, workdir: work, slots: 2, share: 3, slowdown: 1.5, env: {OMP_NUM_THREADS: 1, V: 1.10},
     interface: lo, address: 127.0.0.2, python: PYTHON}
  - {name: pc2, transport: local, share: 0}
"""


def test_several_hosts_on_this_computer(tmp_path):
    text = SEVERAL.replace("PYTHON", sys.executable)
    first, second = load(tmp_path, text).hosts
    assert first == Host(
        name="pc1",
        workdir=str(tmp_path / "work"),
        python=sys.executable,
        address="127.0.0.2",
        interface="lo",
        slots=2,
        share=3.0,
        slowdown=1.5,
        env={"OMP_NUM_THREADS": "1", "V": "1.10"},
    )
    assert second == Host(name="pc2", workdir=str(tmp_path / "home/hosts/pc2"), python=sys.executable, share=0.0)


def test_the_name_is_that_of_the_file(tmp_path):
    assert load(tmp_path, "hosts: [localhost]", name="my lab.yaml").name == "my-lab"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().upper()])
def test_names_of_this_computer_need_no_transport(tmp_path, name):
    assert load(tmp_path, f"hosts: ['{name}']").head.transport == "local"


def test_another_computer_is_refused_until_ssh_is_there(tmp_path):
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "hosts: [node1.example]")
    assert caught.value.exit_code == 2
    assert "node1.example is another computer" in caught.value.seen
    assert "SSH" in caught.value.seen
    assert "transport: local" in caught.value.fix


def test_the_python_of_a_virtual_environment_stays_a_link(tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert load(tmp_path, "hosts: [{name: localhost, python: ./python}]").head.python == str(link)


def test_a_python_on_the_path(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "python3.99"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    assert load(tmp_path, "hosts: [{name: localhost, python: python3.99}]").head.python == str(tool)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "hf_token"])
def test_secrets_are_refused_and_not_repeated(tmp_path, name):
    with pytest.raises(SpecError) as caught:
        load(tmp_path, f"hosts: [{{name: localhost, env: {{{name}: abc123}}}}]")
    assert name in str(caught.value)
    assert "abc123" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        load_cluster(None, [f"hosts.local.env.{name}=abc123"], home=tmp_path)
    assert name in str(caught.value)
    assert "abc123" not in str(caught.value)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "OMP_NUM_THREADS"])
def test_other_variables_are_no_secrets(tmp_path, name):
    assert load(tmp_path, f"hosts: [{{name: localhost, env: {{{name}: x}}}}]").head.env == {name: "x"}


def test_the_resolved_cluster_survives_json(tmp_path):
    cluster = load(tmp_path, "hosts: [{name: pc1, transport: local, share: 2, env: {A: b}}]")
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize("suffix", ["", ".txt", ".hosts"])
def test_any_other_file_is_a_hostfile(tmp_path, suffix):
    assert load(tmp_path, "localhost slots=2\n", name=f"hosts{suffix}").head.slots == 2


def test_lines_with_slots_are_a_hostfile_under_any_name(tmp_path):
    assert load(tmp_path, "# gang\nlocalhost slots=2\n").head.slots == 2


def test_yaml_is_yaml_under_any_name(tmp_path):
    assert load(tmp_path, "# gang\nhosts: [{name: localhost, slots: 2}]\n", name="hosts").head.slots == 2

"""What cluster.yaml means."""

import json
import os
import socket
import sys
from dataclasses import replace

import pytest

from gangline.config.load import default_cluster, load_cluster
from gangline.errors import SpecError
from gangline.launch.backends import BACKENDS
from gangline.runs.cluster import Cluster, Environment, Host
from gangline.runs.training_environment import FILE, TrainingEnvironment


def load(folder, text, *overrides, name="cluster.yaml"):
    (folder / name).write_text(text, encoding="utf-8")
    return load_cluster(folder / name, overrides, home=folder / "home")


def test_without_a_file_there_is_this_computer(tmp_path):
    cluster = load_cluster(None, home=tmp_path)
    assert cluster == Cluster(name="local", hosts=(Host(name="local", workdir=str(tmp_path), python=sys.executable),))


def test_ranks_on_this_computer_use_what_gangline_setup_built(tmp_path):
    python = tmp_path / "environments" / "python"
    TrainingEnvironment(python=str(python), lock="0" * 16).save(tmp_path / FILE)
    assert load_cluster(None, home=tmp_path).head.python == sys.executable, "it was removed since"
    python.parent.mkdir()
    python.touch()
    assert load_cluster(None, home=tmp_path).head.python == str(python)
    (tmp_path / FILE).write_text("{")
    assert load_cluster(None, home=tmp_path).head.python == sys.executable


def test_without_a_file_overrides_count(tmp_path):
    cluster = load_cluster(None, ["hosts.local.slots=3", "hosts.0.env.A=007"], home=tmp_path)
    assert (cluster.head.slots, cluster.head.env, cluster.head.workdir) == (3, {"A": "007"}, str(tmp_path))


SEVERAL = """\
name: home
hosts:
  - {name: pc1, transport: local, workdir: work, slots: 2, share: 3, env: {OMP_NUM_THREADS: 1, V: 1.10},
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
        env={"OMP_NUM_THREADS": "1", "V": "1.10"},
        environment=Environment(kind="own", path=sys.executable),
    )
    assert second == Host(name="pc2", workdir=str(tmp_path / "home/hosts/pc2"), python=sys.executable, share=0.0)


def test_the_name_is_that_of_the_file(tmp_path):
    assert load(tmp_path, "hosts: [localhost]", name="my lab.yaml").name == "my-lab"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().upper()])
def test_names_of_this_computer_need_no_transport(tmp_path, name):
    assert load(tmp_path, f"hosts: ['{name}']").head.transport == "local"


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
OVER_SSH = f"""\
environment: {{conda: ~/envs/train}}
shared: /mnt/nas
ports: 29500-29599
supervisor: here
hosts:
  - {{name: pc1, address: 192.168.1.10}}
  - name: pc2
    ssh: alice@pc2.lan
    port: 2222
    host_key: {KEY}
    address: 192.168.1.11
    workdir: /data/gang
    python: /opt/train/bin/python
    interface: eno1
    slots: 8
  - {{name: pc3, ssh: bob@192.168.1.12, environment: {{modules: [cuda/12.8, python/3.12], python: python3.12}}}}
"""


def test_hosts_over_ssh(tmp_path):
    cluster = load(tmp_path, OVER_SSH)
    assert (cluster.shared, cluster.ports, cluster.supervisor) == (("/mnt/nas",), (29500, 29599), "here")
    assert cluster.hosts == (
        Host(
            name="pc1",
            workdir="~/gangline",
            python="",
            transport="ssh",
            address="192.168.1.10",
            environment=Environment(kind="conda", path="~/envs/train"),
        ),
        Host(
            name="pc2",
            workdir="/data/gang",
            python="/opt/train/bin/python",
            transport="ssh",
            ssh="alice@pc2.lan",
            ssh_port=2222,
            host_key=KEY,
            environment=Environment(kind="own", path="/opt/train/bin/python"),
            address="192.168.1.11",
            interface="eno1",
            slots=8,
        ),
        Host(
            name="pc3",
            workdir="~/gangline",
            python="python3.12",
            transport="ssh",
            ssh="bob@192.168.1.12",
            environment=Environment(kind="modules", modules=("cuda/12.8", "python/3.12")),
            address="192.168.1.12",
        ),
    )
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_a_host_over_ssh_gets_an_environment_of_ours_if_nobody_says_another(tmp_path):
    head, own, image = load(
        tmp_path,
        "hosts: [10.0.0.1, {name: localhost, address: 10.0.0.2}, {name: 10.0.0.3, environment: {apptainer: /x.sif}}]",
    ).hosts
    assert (head.environment, head.python) == (Environment(kind="locked"), "")
    assert (own.environment, own.python, own.transport) == (Environment(), sys.executable, "local")
    assert (image.environment, image.python) == (Environment(kind="apptainer", path="/x.sif"), "python3")


def test_an_image_of_podman_or_docker(tmp_path):
    text = "hosts: [{name: a, ssh: 10.0.0.1}]\nenvironment: {podman: localhost/train:1, python: /opt/venv/bin/python}"
    expected = Environment(kind="podman", path="localhost/train:1", python="/opt/venv/bin/python")
    assert (load(tmp_path, text).head.environment, load(tmp_path, text).head.python) == (expected, "")
    assert load(tmp_path, text.replace("podman", "docker")).head.environment.kind == "docker"
    with pytest.raises(SpecError, match=r"the name of a container image"):
        load(tmp_path, text.replace("localhost/train:1", "/images/x.sif"))
    with pytest.raises(SpecError, match=r"apptainer: IMAGE\.sif"):
        load(tmp_path, "slurm: {nodes: 2}\nenvironment: {podman: localhost/train:1}")


def test_a_lock_of_the_users(tmp_path):
    (tmp_path / "my.lock").touch()
    text = "environment: {lock: ./my.lock}\nhosts: [{name: a, ssh: 10.0.0.1}, {name: b, transport: local, address: 10.0.0.2}]"
    expected = Environment(kind="locked", path=str(tmp_path / "my.lock"))
    assert [(host.environment, host.python) for host in load(tmp_path, text).hosts] == [(expected, "")] * 2


def test_the_environment_of_the_cluster_can_be_given_on_the_command_line(tmp_path):
    text = "hosts: [{name: a, ssh: 10.0.0.1}]"
    assert load(tmp_path, text, "environment.conda=/envs/x").head.environment.path == "/envs/x"
    assert load(tmp_path, text, "environment=locked").head.environment.kind == "locked"
    own = load(tmp_path, text, "hosts.a.environment.python=/opt/python")
    assert (own.head.environment.kind, own.head.python) == ("own", "/opt/python")


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        ("{name: elsewhere}", "ssh"),
        ("{name: localhost}", "local"),
        ("{name: elsewhere, transport: local}", "local"),
        ("{name: localhost, transport: ssh}", "ssh"),
        ("{name: HERE}", "local"),
        ("{name: HERE, ssh: alice@HERE}", "ssh"),
        ("{name: HERE, port: 22}", "ssh"),
        (f"{{name: HERE, host_key: {KEY}}}", "ssh"),
    ],
)
def test_how_a_host_is_reached(tmp_path, text, transport):
    assert load(tmp_path, f"hosts: [{text}]".replace("HERE", socket.gethostname())).head.transport == transport


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("{name: a, ssh: alice@10.0.0.1}", "10.0.0.1"),
        ("{name: a, ssh: fe80::1%eth0}", "fe80::1"),
        ("{name: a, ssh: 'alice@::1'}", "::1"),
        ("{name: 10.0.0.1}", "10.0.0.1"),
        ("{name: 10.0.0.1, ssh: 10.0.0.2}", "10.0.0.2"),
        ("{name: 10.0.0.1, ssh: 10.0.0.2, address: 10.0.0.3}", "10.0.0.3"),
        ("{name: a, address: pc1.lan}", "pc1.lan"),
    ],
)
def test_an_ip_address_that_ssh_is_told_is_the_address_of_the_host(tmp_path, text, address):
    assert load(tmp_path, f"hosts: [{text}, {{name: b, address: 10.9.9.9}}]").head.address == address


def test_one_host_alone_needs_no_address(tmp_path):
    assert load(tmp_path, "hosts: [elsewhere]").head.address == "127.0.0.1"


@pytest.mark.parametrize(
    "text",
    [
        "[{name: a, ssh: 10.0.0.1}, {name: b, ssh: 10.0.0.2}]",
        "[{name: a, ssh: 10.0.0.1, workdir: /x}, {name: b, transport: local, address: 10.0.0.2, workdir: /x}]",
        "[{name: a, ssh: 10.0.0.1, workdir: /x}, {name: b, ssh: 10.0.0.1, port: 2222, workdir: /y}]",
    ],
)
def test_work_folders_may_have_one_name_on_different_computers(tmp_path, text):
    assert len(load(tmp_path, f"hosts: {text}").hosts) == 2


@pytest.mark.parametrize(
    "text",
    [
        "hosts: [{name: a, ssh: 10.0.0.1}, {name: b, ssh: 10.0.0.1, port: 2222}]",
        "hosts: [{name: a, ssh: a, address: 10.0.0.1}, {name: b, ssh: b, address: 10.0.0.1}]",
        "shared: /nas\nhosts: [{name: a, ssh: 10.0.0.1, workdir: /nas/x}, {name: b, ssh: 10.0.0.2, workdir: /nas/x}]",
    ],
)
def test_work_folders_differ_where_they_would_be_one_folder(tmp_path, text):
    with pytest.raises(SpecError, match=r"hosts\.1"):
        load(tmp_path, text)


def test_a_hostfile_of_other_computers_is_for_init(tmp_path):
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "node1 slots=8\nnode2 slots=8\n", name="hostfile")
    assert "node1, node2 are other computers" in caught.value.seen
    assert caught.value.fix == f"gangline init --hostfile {tmp_path / 'hostfile'}"


def test_the_cluster_file_that_is_meant_where_none_is_named(tmp_path):
    assert default_cluster(tmp_path) is None
    (tmp_path / "cluster.yaml").mkdir()
    assert default_cluster(tmp_path) is None
    (tmp_path / "cluster.yaml").rmdir()
    (tmp_path / "cluster.yaml").touch()
    assert default_cluster(tmp_path) == tmp_path / "cluster.yaml"


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


def test_a_host_whose_processor_is_meant_hides_its_gpu(tmp_path):
    host = load(tmp_path, "hosts: [{name: localhost, gpu: none}]").head
    assert (host.gpu, host.env) == ({}, {"CUDA_VISIBLE_DEVICES": ""})


def test_a_card_in_no_list_has_the_figures_that_its_owner_gives(tmp_path):
    text = "hosts: [{name: localhost, gpu: {tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900.5}}]"
    host = load(tmp_path, text).head
    assert host.gpu == {"tflops_bf16": 100, "memory_gib": 24, "bandwidth_gbs": 900.5}
    assert host.env == {}
    cluster = load(tmp_path, text)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


# --- the backend


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("mpirn", 'did you mean "mpirun"?'),
        ("deepspeed", "write `pdsh`, which is what DeepSpeed's launcher starts its hosts by"),
        ("kubernetes", "or install the package that has it"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_with_what_to_write(tmp_path, name, fix):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"hosts: [{{name: my-pc, transport: local}}]\nbackend: {name}\n")
    with pytest.raises(SpecError, match=r"expected one of") as caught:
        load_cluster(path, home=tmp_path, backends=BACKENDS)
    assert fix in str(caught.value)


# --- a Slurm cluster in place of hosts


def slurm_of(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path, home=tmp_path)


TWO = "{name: pc1, ssh: a@10.0.0.1}, {name: pc2, ssh: a@10.0.0.2}"


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (f"hosts: [{TWO}]", "2 hosts"),
        (f"hosts: [{TWO}, localhost]", "localhost, which is this computer"),
        (f"hosts: [{TWO}, 10.0.0.3]\nsupervisor: here", "`supervisor: here`"),
        (f"hosts: [{TWO}, 10.0.0.3]\nbackend: mpirun", "`backend: mpirun`"),
    ],
)
def test_votes_are_refused_where_no_majority_could_remain(tmp_path, words, seen):
    with pytest.raises(SpecError, match=f"votes, and {seen}"):
        load(tmp_path, f"{words}\ntakeover: votes\n")


def test_three_hosts_over_ssh_may_vote(tmp_path):
    assert load(tmp_path, f"hosts: [{TWO}, 10.0.0.3]\ntakeover: votes\n").takeover == "votes"


VOTES = f"hosts: [{TWO}]\ntakeover: votes\n"


def test_a_witness_gives_two_hosts_a_third_voice(tmp_path):
    cluster = load(tmp_path, f"{VOTES}witness: 10.0.0.9\n")
    assert (cluster.witness.address, cluster.witness.workdir) == ("10.0.0.9", "~/gangline")
    assert cluster.voters == (*cluster.hosts, cluster.witness)
    assert replace(cluster, hosts=cluster.hosts[:1]).voters == ()
    of_three = load(tmp_path, f"hosts: [{TWO}, 10.0.0.3]\ntakeover: votes\nwitness: 10.0.0.9\n")
    assert of_three.voters == of_three.hosts  # four would bear the loss of one, as three do


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{VOTES}witness: {{name: nas}}\n", r"where the hosts reach it"),
        (f"{VOTES}witness: {{name: pc2, address: 10.0.0.9}}\n", r"which is the host pc2"),
        (f"{VOTES}witness: {{name: nas, ssh: b@10.0.0.2}}\n", r"which is the host pc2"),
        (f"hosts: [{TWO}]\nwitness: 10.0.0.9\n", r"nobody votes"),
        (f"{VOTES}witness: {{name: nas, address: 10.0.0.9, ssh: 'b@nas:22'}}\n", r"name of your ssh_config"),
        (f"{VOTES}witness: {{name: nas, address: 10.0.0.9, workdir: /a/../b}}\n", r"path without"),
        ("hosts: [pc1]\ntakeover: votes\nwitness: 10.0.0.9\n", r"votes, and 1 host"),
    ],
)
def test_a_witness_is_a_machine_of_its_own_that_the_hosts_reach(tmp_path, words, said):
    with pytest.raises(SpecError, match=said):
        load(tmp_path, words)


def test_a_slurm_cluster_has_no_hosts_before_its_allocation(tmp_path):
    words = "slurm: {partition: gpu, nodes: 2, gpus_per_node: a100:4, time: 04:00:00, memory: 64G}\n"
    cluster = slurm_of(tmp_path, words)
    assert (cluster.hosts, cluster.backend) == ((), "slurm")
    asked = {"--partition=gpu", "--nodes=2", "--gpus-per-node=a100:4", "--time=04:00:00", "--mem=64G"}
    assert asked <= set(cluster.slurm.directives)


def test_nodes_of_two_kinds_are_one_heterogeneous_job(tmp_path):
    words = (
        "slurm: {partition: gpu, account: x, nodes: 2, gpus_per_node: a100:4, gpu: a100-80gb, time: 90, components: "
        "[{nodes: 1, gpus_per_node: h100:8, partition: fast, gpu: h100-sxm}, {gpus_per_node: 2}]}\n"
    )
    asked = slurm_of(tmp_path, words).slurm
    options = asked.directives
    borders = [number for number, word in enumerate(options) if word == "hetjob"]
    assert len(borders) == 2
    first, second, third = options[: borders[0]], options[borders[0] + 1 : borders[1]], options[borders[1] + 1 :]
    assert {"--nodes=2", "--gpus-per-node=a100:4", "--partition=gpu"} <= set(first)
    assert {"--nodes=1", "--gpus-per-node=h100:8", "--partition=fast", "--account=x", "--time=90"} <= set(second)
    assert {"--nodes=1", "--gpus-per-node=2", "--partition=gpu", "--account=x"} <= set(third)
    assert asked.num_nodes == 4
    assert [kind.gpu for kind in asked.kinds] == ["a100-80gb", "h100-sxm", None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("slurm: {}\nhosts: [pc1]\n", "one of both"),
        ("slurm: {}\nbackend: direct\n", "expected slurm"),
        ("slurm: {time: soon}\n", "a time as Slurm writes it"),
        ("slurm: {partiton: gpu}\n", 'did you mean "partition"'),
        ("slurm: {partition: 'gpu --wrap=x'}\n", "a name as Slurm has it"),
        ("slurm: {options: ['--x\\nrm -rf /']}\n", "an option of sbatch"),
        ("slurm: {workdir: ../x}\n", "a path on the host"),
        ("slurm: {env: {HF_TOKEN: x}}\n", "no secrets"),
        ("slurm: {shared_home: false, components: [{nodes: 2}]}\n", "one of both"),
        ("slurm: {components: [{nodes: 0}]}\n", "slurm.components"),
        ("name: campus\n", "this key is missing"),
    ],
)
def test_mistakes_in_a_slurm_cluster_are_named(tmp_path, words, said):
    with pytest.raises(SpecError) as caught:
        slurm_of(tmp_path, words)
    assert said in str(caught.value)

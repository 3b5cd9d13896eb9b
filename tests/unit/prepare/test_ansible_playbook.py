"""The playbook of a cluster: what is looked at, what changes it, and no template where a text only looks like one."""

import hashlib

from ruamel.yaml import YAML

from gangline.prepare.ansible_playbook import playbook_files
from gangline.prepare.prepare_step import CommandChange, FileChange, HostReading, StepPlan, activated
from gangline.runs.cluster import Host

PC1 = Host(
    name="pc1",
    workdir="/w",
    python="",
    transport="ssh",
    ssh="alice@192.0.2.1",
    ssh_port=2222,
    host_key="ssh-ed25519 AA",
)
PC2 = Host(name="pc2", workdir="/w", python="", transport="local")
READING = HostReading(user="alice", uid=1000, home="/home/alice", files={}, folders={}, commands={}, programs={})
HOSTNAME = CommandChange(argv=("hostname", "pc1"), undo=(), probe=("uname", "-n"), before="a", after="pc1")


def written(*changes, hosts=(PC1, PC2), **options):
    plans = {"pc1": {"names": StepPlan(changes=changes, **options)}, "pc2": {"names": StepPlan()}}
    return playbook_files(plans, hosts, {"pc1": READING})


def play(files):
    (found,) = YAML(typ="safe").load(files["playbook.yml"])
    return found


def modules(tasks):
    return [next(key.removeprefix("ansible.builtin.") for key in task if "." in key) for task in tasks]


def test_hosts_are_reached_as_gangline_reaches_them_with_their_keys_only():
    files = written(HOSTNAME)
    (name, words), *others = YAML(typ="safe").load(files["inventory.yml"])["all"]["hosts"].items()
    assert (name, others) == ("pc1", [])
    assert (words["ansible_host"], words["ansible_user"], words["ansible_port"]) == ("192.0.2.1", "alice", 2222)
    assert "StrictHostKeyChecking=yes" in words["ansible_ssh_common_args"]
    assert files["known_hosts"] == "pc1 ssh-ed25519 AA\n"
    assert written() == {}


def test_a_command_runs_only_where_its_state_is_the_old_one():
    tasks = play(written(HOSTNAME))["tasks"]
    assert modules(tasks) == ["command", "assert", "command"]
    assert tasks[1]["ansible.builtin.assert"]["that"] == [
        "names_1.stdout | default('') | trim in [gangline.before, gangline.after]"
    ]
    assert tasks[2]["when"] == "names_1.stdout | default('') | trim != gangline.after"
    assert tasks[2]["vars"]["gangline"] == {"before": "a", "after": "pc1"}
    assert tasks[2]["become"] is True


def test_a_file_is_brought_as_it_is_and_its_folder_made_where_it_is_missing():
    content = b"{{ x }}\n"
    files = written(FileChange(path="/etc/x/a b", before=None, content=content, mode=0o600, folder_mode=0o700))
    tasks = play(files)["tasks"]
    assert modules(tasks) == ["stat", "assert", "stat", "file", "copy"]
    assert tasks[1]["vars"]["gangline_digests"] == ["absent", hashlib.sha256(content).hexdigest()]
    assert (tasks[3]["ansible.builtin.file"]["mode"], tasks[4]["ansible.builtin.copy"]["mode"]) == ("0700", "0600")
    assert files[tasks[4]["ansible.builtin.copy"]["src"]] == content


def test_what_puts_changes_into_force_waits_for_them():
    change = FileChange(path="/etc/a", before=b"", content=b"1")
    found = play(written(*activated((change,), ("systemctl", "reload", "x.service"))))
    (handler,) = found["handlers"]
    assert found["tasks"][2]["notify"] == [handler["name"]]
    assert modules([found["tasks"][-1], handler]) == ["meta", "systemd_service"]


def test_a_text_that_looks_like_a_template_is_none():
    change = CommandChange(argv=("echo", "{{ secret }}"), undo=(), probe=("true",), before="{% x %}", after="y")
    task = play(written(change))["tasks"][-1]
    assert task["ansible.builtin.command"]["argv"] == ["echo", "{% raw %}{{ secret }}{% endraw %}"]
    assert task["vars"]["gangline"]["before"] == "{% raw %}{% x %}{% endraw %}"
    assert "{" not in task["name"]


def test_a_step_that_can_lock_out_is_kept_over_a_new_connection():
    files = written(HOSTNAME, revert_s=60.0)
    tasks = play(files)["tasks"]
    assert modules(tasks) == ["file", "copy", "command", "meta", "command"]
    assert tasks[3]["ansible.builtin.meta"] == "reset_connection"
    assert tasks[4]["ansible.builtin.command"]["argv"][-1] == "keep"
    assert "names:root:1:60" in files["scripts/pc1-names.sh"]

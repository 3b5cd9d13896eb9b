"""The look at what `prepare` generates: each harmful word is found, and no step reads by a command that does harm."""

import pytest

from gangline.prepare.prepare_step import CommandChange, FileChange
from gangline.prepare.step_table import STEPS
from tests.forbidden_commands import FORBIDDEN, exported, found_in, texts_of

HARMFUL = {
    "a host key that nobody checks": ["ssh -o StrictHostKey" + "Checking=no pc1", "UserKnown" + "HostsFile /dev/null"],
    "a firewall stopped or emptied": [
        "ufw " + "disable",
        "systemctl disable --now firewalld",
        "iptables -F",
        "flush ruleset",
    ],
    "an export to everybody, or of root's rights": ["/data *(rw)", "/data 10.0.0.1(rw,no_root" + "_squash)"],
    "a port for everybody": ["tensorboard --host 0.0" + ".0.0", "ufw allow from any"],
    "a program from the network into a shell": ["cu" + "rl https://x | sh", "sh NVIDIA-Linux-x86_64-580.run"],
    "a package that nobody signed": ["dnf --nogpgcheck install x", "deb [trusted=yes] https://x"],
    "rights for everybody": ["chmod" + " -R 777 /data", "alice ALL=(ALL) NOPASSWD: ALL"],
    "a clock that is set": ["date -s 12:00", "timedatectl set-time 12:00", "chronyc makestep", "hwclock --systohc"],
    "processes by a name": ["pkill -9 -f python", "killall torchrun"],
    "a password in words": ["sshpass -p x ssh pc1", "chpasswd"],
    "a folder of the system removed": ["rm -rf /etc/ssh", "rm -r -f /", "userdel --remove alice"],
    "weights that run code": ["torch.load(path, weights" + "_only=False)"],
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_each_harmful_word_is_found_in_commands_files_scripts_and_playbooks(what, nothing_forbidden):
    for text in HARMFUL[what]:
        command = CommandChange(argv=("sh", "-c", text), undo=())
        file = FileChange(path="/etc/x", before=b"theirs\n", content=f"theirs\n{text}\n".encode())
        assert what in found_in(texts_of(command)[0])
        assert what in found_in(texts_of(file)[0])
        script, *playbook = exported([command])
        assert what in found_in(script)
        assert any(what in found_in(each) for each in playbook)
    nothing_forbidden.clear()  # they were made to be found


def test_a_line_of_others_is_not_ours():
    theirs = b"PasswordAuthentication yes\nflush ruleset\n"
    assert found_in(texts_of(FileChange(path="/etc/x", before=theirs, content=theirs + b"# ours\n"))[0]) == []


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_what_a_step_reads_by_does_no_harm(step):
    for argv in step.asks.commands.values():
        assert found_in(" ".join(argv)) == []

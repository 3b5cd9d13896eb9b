"""From names to a cluster.yaml, with hosts that are not there."""

import dataclasses
import json
import socket
import stat
from pathlib import Path

import pytest

from gangline.config.load import load_cluster
from gangline.errors import HostKeyRefused, HostUnreachable, SpecError, UsageError
from gangline.init.describe import InitQuestion, init
from tests.unit.init.world import Talk, World, facts, fingerprint, gpu, home_lan, key, nic

GOLDEN = Path(__file__).parent / "cluster.yaml"


@pytest.fixture
def world():
    return World(hosts=home_lan())


def described(world, folder, *names, console=None, **options):
    console = console or Talk(answers=["y"])
    asked = InitQuestion(
        home=folder / "home", output=folder / "cluster.yaml", names=names or ("pc1", "alice@pc2", "pc3"), **options
    )
    return init(asked, console=console, deps=world.deps())


def test_the_file_of_three_computers_at_home(world, tmp_path):
    """`python tests/unit/init/test_init.py` writes the golden file anew; read the difference before you keep it."""
    found = described(world, tmp_path)
    assert found.path == tmp_path / "cluster.yaml"
    assert found.path.read_text(encoding="utf-8") == GOLDEN.read_text(encoding="utf-8")
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


def test_the_file_says_what_was_found(world, tmp_path):
    described(world, tmp_path, name="home")
    cluster = load_cluster(tmp_path / "cluster.yaml", home=tmp_path / "home")
    assert cluster.name == "home"
    assert [(host.name, host.ssh, host.address, host.slots) for host in cluster.hosts] == [
        ("pc1", None, "192.168.1.10", 1),
        ("pc2", "alice@pc2", "192.168.1.11", 2),
        ("pc3", None, "192.168.1.12", 1),
    ]
    assert [host.host_key for host in cluster.hosts] == [key("pc1"), key("pc2"), key("pc3")]
    assert {host.environment.kind for host in cluster.hosts} == {"locked"}


def test_the_table_shows_what_people_compare(world, tmp_path):
    console = Talk(answers=["y"])
    described(world, tmp_path, console=console)
    assert f"pc2  alice@pc2.lan  ssh-ed25519  {fingerprint(key('pc2'))}  new" in console.lines
    assert "pc1  NVIDIA GeForce RTX 5070 Ti  12 GiB  570.124  eno1 1 Gb/s  96 GiB  3.12.3" in console.lines
    assert "pc2  2 x NVIDIA GeForce RTX 4070  8 GiB  570.124  enp3s0 2.5 Gb/s  96 GiB  3.12.3" in console.lines
    assert "pc3  none  -  -  enp5s0 100 Mb/s !  96 GiB  3.12.3" in console.lines


# --- trust


def test_keys_are_trusted_by_a_clear_yes_only(world, tmp_path):
    for answer in ("", "n", "no", "yep", "Y E S"):
        with pytest.raises(UsageError, match="not trusted"):
            described(world, tmp_path, console=Talk(answers=[answer]))
    assert world.trusted == []
    assert not (tmp_path / "cluster.yaml").exists()
    console = Talk(answers=[" Yes "])
    described(world, tmp_path, console=console)
    assert console.questions == ["trust 3 new keys? [y/N]"]
    assert world.trusted == [(name, key(name)) for name in ("pc1", "pc2", "pc3")]


def test_without_a_terminal_the_fingerprints_are_told_and_nobody_is_trusted(world, tmp_path):
    with pytest.raises(UsageError) as caught:
        described(world, tmp_path, console=Talk())
    assert caught.value.exit_code == 2
    assert all(fingerprint(key(name)) in caught.value.seen for name in ("pc1", "pc2", "pc3"))
    assert "--yes" in caught.value.fix
    assert world.trusted == []


def test_yes_trusts_and_says_so(world, tmp_path):
    console = Talk()
    described(world, tmp_path, console=console, yes=True)
    assert "trusted without a question (--yes): pc1, pc2, pc3" in console.lines


def test_a_key_that_ssh_knows_needs_no_question(world, tmp_path):
    world.known = {name: key(name) for name in ("pc1", "pc2")}
    console = Talk(answers=["y"])
    described(world, tmp_path, console=console)
    assert console.questions == ["trust 1 new key? [y/N]"]
    assert console.text.count("known to your ssh") == 2


def test_a_key_that_ssh_knows_otherwise_ends_it_even_with_yes(world, tmp_path):
    world.known = {"pc2": key("another")}
    with pytest.raises(HostKeyRefused) as caught:
        described(world, tmp_path, console=Talk(), yes=True)
    assert caught.value.exit_code == 4
    assert fingerprint(key("another")) in caught.value.seen
    assert fingerprint(key("pc2")) in caught.value.seen
    assert "console" in caught.value.fix
    assert world.trusted == []


# --- hosts that fail


def test_nobody_answers(world, tmp_path):
    world.silent = {"pc1", "pc2", "pc3"}
    with pytest.raises(HostUnreachable) as caught:
        described(world, tmp_path, yes=True)
    assert caught.value.exit_code == 4
    assert "pc2 does not answer; timed out" in caught.value.seen


def test_all_hosts_that_answer_fail(world, tmp_path):
    world.broken = dict.fromkeys(("pc1", "pc2", "pc3"), "no Python 3.8")
    with pytest.raises(HostUnreachable, match="no host answers"):
        described(world, tmp_path, yes=True, force=True)


@pytest.mark.parametrize("answers", [None, ["n"]])
def test_some_fail_and_nothing_is_written_without_a_yes(world, tmp_path, answers):
    world.silent, world.broken = {"pc2"}, {"pc3": "its facts cannot be read"}
    with pytest.raises(HostUnreachable) as caught:
        described(world, tmp_path, yes=True, console=Talk(answers=answers))
    assert "pc2 does not answer" in caught.value.seen
    assert "pc3: its facts cannot be read" in caught.value.seen
    assert not (tmp_path / "cluster.yaml").exists()


@pytest.mark.parametrize(("answers", "force"), [(["y"], False), (None, True)])
def test_the_file_of_the_rest(world, tmp_path, answers, force):
    world.silent, world.broken = {"pc2"}, {"pc3": "its facts cannot be read"}
    console = Talk(answers=answers)
    found = described(world, tmp_path, yes=True, force=force, console=console)
    assert [host.name for host in load_cluster(found.path, home=tmp_path).hosts] == ["pc1"]
    assert "failed: pc2 does not answer; timed out" in console.lines
    assert "failed: pc3: its facts cannot be read" in console.lines
    assert set(found.failed) == {"pc2", "pc3"}


def test_two_names_for_one_machine_are_refused(world, tmp_path):
    world.hosts["pc3"] = dataclasses.replace(world.hosts["pc3"], system=world.hosts["pc1"].system)
    with pytest.raises(UsageError, match="pc1 and pc3 are one machine"):
        described(world, tmp_path)


# --- addresses


def test_the_only_shared_network(world, tmp_path):
    console = Talk(answers=["y"])
    found = described(world, tmp_path, console=console)
    assert "network: 192.168.1.0/24: the only network that all hosts share" in console.lines
    assert "# addresses: 192.168.1.0/24: the only network that all hosts share\n" in found.text


def two_networks():
    return World(
        hosts={
            f"pc{n}": facts(f"pc{n}", nic("eno1", f"10.5.0.{n}/24"), nic("ens6", f"10.9.0.{n}/24", speed=100000))
            for n in (1, 2)
        }
    )


def test_the_best_network_is_tried(tmp_path):
    found = described(two_networks(), tmp_path, "pc1", "pc2")
    assert [host.address for host in found.cluster.hosts] == ["10.9.0.1", "10.9.0.2"]
    assert "# addresses: 10.9.0.0/24: the best of 2 networks that all hosts share\n" in found.text


def test_a_network_in_which_they_do_not_reach_each_other_is_passed_over(tmp_path):
    world, console = two_networks(), Talk(answers=["y"])
    world.dead_networks = {"10.9."}
    found = described(world, tmp_path, "pc1", "pc2", console=console)
    assert [host.address for host in found.cluster.hosts] == ["10.5.0.1", "10.5.0.2"]
    assert (
        "warning: 10.5.0.0/24: the next best of 2 networks that all hosts share; in 10.9.0.0/24 they do not reach each other"
        in console.lines
    )


def test_no_network_works(tmp_path):
    world, console = two_networks(), Talk(answers=["y"])
    world.dead_networks = {"10."}
    found = described(world, tmp_path, "pc1", "pc2", console=console)
    assert [host.address for host in found.cluster.hosts] == ["10.9.0.1", "10.9.0.2"]
    assert any(line.startswith("warning: ") and "in none of them" in line for line in console.lines)


def test_no_network_is_shared(tmp_path):
    world, console = (
        World(hosts={"a": facts("a", nic("eno1", "10.0.0.1/24")), "b": facts("b", nic("eno1", "10.1.0.1/24"))}),
        Talk(answers=["y"]),
    )
    found = described(world, tmp_path, "a", "b", console=console)
    assert [host.address for host in found.cluster.hosts] == ["203.0.113.97", "203.0.113.98"]
    assert any(line.startswith("warning: the hosts share no network") for line in console.lines)


# --- names, hostfiles and this computer


def test_this_computer_may_be_a_host(tmp_path):
    own = socket.gethostname().partition(".")[0]
    world = World(hosts={own: facts(own, nic("eno1", "192.168.1.2/24")), **home_lan()})
    found = described(world, tmp_path, "localhost", "pc1")
    here, pc1 = load_cluster(found.path, home=tmp_path / "home").hosts
    assert (here.name, here.transport, here.address, here.host_key) == (own, "local", "192.168.1.2", None)
    assert (pc1.name, pc1.transport, pc1.address) == ("pc1", "ssh", "192.168.1.10")
    assert [name for name, _ in world.trusted] == [own, "pc1"]


def test_this_computer_alone_shows_no_key(tmp_path):
    own = socket.gethostname().partition(".")[0]
    world = World(hosts={own: facts(own, nic("eno1", "192.168.1.2/24"))})
    found = described(world, tmp_path, "localhost", console=Talk())
    assert found.cluster.head.transport == "local"


def test_a_hostfile_keeps_its_slots_interfaces_and_variables(world, tmp_path):
    (tmp_path / "hostfile").write_text('pc1 slots=4 eno1 NCCL_DEBUG=INFO MOTD="#1:x\npc2:3\npc3\n')
    asked = InitQuestion(home=tmp_path, output=tmp_path / "out.yaml", hostfile=tmp_path / "hostfile")
    init(asked, console=Talk(answers=["y"]), deps=world.deps())
    pc1, pc2, pc3 = load_cluster(tmp_path / "out.yaml", home=tmp_path).hosts
    assert (pc1.slots, pc1.interface, pc1.env) == (4, "eno1", {"NCCL_DEBUG": "INFO", "MOTD": '"'})
    assert (pc2.slots, pc2.address, pc3.slots) == (3, "192.168.1.11", 1)


def test_a_home_folder_that_hosts_share_gives_each_a_folder_of_its_own(world, tmp_path):
    for name, workdir in (("pc1", "/home/fake/gangline"), ("pc2", "/home/fake/gangline"), ("pc3", "/local/gangline")):
        source = "nas:/home" if name != "pc3" else "/dev/sda1"
        filesystem = "nfs4" if name != "pc3" else "ext4"
        old = world.hosts[name]
        world.hosts[name] = facts(name, *old.nics[1:], filesystem=filesystem, source=source, workdir=workdir)
    found = described(world, tmp_path)
    assert [host.workdir for host in found.cluster.hosts] == ["~/gangline/pc1", "~/gangline/pc2", "~/gangline"]


@pytest.mark.parametrize(
    "names", [("-oProxyCommand=x",), ("pc1", "pc1"), ("a b",), ("pc1;reboot",), ("$(id)",), ("pc1", "alice@")]
)
def test_names_that_are_none(world, tmp_path, names):
    with pytest.raises(SpecError, match="command line: "):
        described(world, tmp_path, *names)
    assert world.trusted == []


def test_names_and_a_hostfile_are_one_too_many(world, tmp_path):
    with pytest.raises(UsageError, match="named twice"):
        described(world, tmp_path, "pc1", hostfile=tmp_path / "hostfile")


@pytest.mark.parametrize("name", ["-x", "a b", "", "a\n", "a/b"])
def test_a_bad_name_for_the_cluster(world, tmp_path, name):
    with pytest.raises(UsageError, match="no name for a cluster"):
        described(world, tmp_path, name=name)


def test_odd_names_are_written_so_that_they_are_read_again(tmp_path):
    names = ("1e3", "no", "0x10", "007", "1.5", "null", "a.b-c_d", "10.0.0.9")
    hosts = {name: facts(name, nic("eno1", f"192.168.1.{number + 1}/24")) for number, name in enumerate(names)}
    found = described(World(hosts=hosts), tmp_path, *names)
    assert [host.name for host in load_cluster(found.path, home=tmp_path).hosts] == list(names)


def test_an_ipv6_address_is_written_so_that_it_is_read_again(tmp_path):
    world = World(
        hosts={"fd00-7": facts("fd00-7", nic("eno1", "fd00::7/64")), "b": facts("b", nic("eno1", "fd00::8/64"))}
    )
    found = described(world, tmp_path, "alice@fd00::7", "b")
    first, second = load_cluster(found.path, home=tmp_path).hosts
    assert (first.name, first.ssh, first.address, second.address) == ("fd00-7", "alice@fd00::7", "fd00::7", "fd00::8")


def test_what_a_host_says_cannot_break_out_of_a_comment(tmp_path):
    evil = "RTX\n  - name: evil\n\x1b[2J\u2028x"
    world = World(hosts={"pc1": facts("pc1", nic("eno1\nx: y", "192.168.1.1/24"), gpus=[gpu(evil)])})
    found = described(world, tmp_path, "pc1")
    assert len(load_cluster(found.path, home=tmp_path).hosts) == 1
    assert all(character.isprintable() or character == "\n" for character in found.text)


# --- questions instead of names


def asking(world, folder, *answers):
    console = Talk(answers=list(answers))
    found = init(InitQuestion(home=folder, output=folder / "cluster.yaml"), console=console, deps=world.deps())
    return console, [host.name for host in found.cluster.hosts]


def test_the_hosts_of_ssh_config_are_offered(world, tmp_path):
    (tmp_path / "config").write_text("Host github.com\n User git\nHost pc1 pc2\nHost pc3\nHost *\n")
    world.ssh_config, world.users = tmp_path / "config", {"github.com": "git"}
    console, names = asking(world, tmp_path, "", "y")
    assert console.lines[0] == f"hosts in {tmp_path}/config: pc1, pc2, pc3"
    assert console.questions[0].endswith(" [pc1 pc2 pc3]")
    assert names == ["pc1", "pc2", "pc3"]


def test_names_are_typed_with_blanks_or_commas(world, tmp_path):
    assert asking(world, tmp_path, "pc1, alice@pc3", "y")[1] == ["pc1", "pc3"]


@pytest.mark.parametrize("answers", [None, [""]])
def test_no_names_and_nobody_who_knows_some(world, tmp_path, answers):
    with pytest.raises(UsageError, match="no hosts are named") as caught:
        init(InitQuestion(home=tmp_path, output=tmp_path / "c.yaml"), console=Talk(answers=answers), deps=world.deps())
    assert "gangline init pc1" in caught.value.fix
    assert "--hostfile" in caught.value.fix


# --- the file


def test_a_file_that_is_there_is_not_replaced(world, tmp_path):
    (tmp_path / "cluster.yaml").write_text("mine\n")
    with pytest.raises(UsageError, match="is there already") as caught:
        described(world, tmp_path)
    assert "| diff " in caught.value.fix
    assert world.trusted == []
    described(world, tmp_path, force=True)
    assert (tmp_path / "cluster.yaml").read_text() != "mine\n"


def test_a_file_that_came_while_we_looked_is_not_replaced(world, tmp_path):
    deps = world.deps()

    def gather(cluster, transports):
        (tmp_path / "cluster.yaml").write_text("mine\n")
        return deps.gather(cluster, transports)

    asked = InitQuestion(home=tmp_path, output=tmp_path / "cluster.yaml", names=("pc1",))
    with pytest.raises(UsageError, match="is there already"):
        init(asked, console=Talk(answers=["y"]), deps=dataclasses.replace(deps, gather=gather))
    assert (tmp_path / "cluster.yaml").read_text() == "mine\n"


def test_a_dry_run_writes_nothing(world, tmp_path):
    (tmp_path / "cluster.yaml").write_text("mine\n")
    found = described(world, tmp_path, dry_run=True)
    assert found.path is None
    assert found.text == GOLDEN.read_text(encoding="utf-8")
    assert (tmp_path / "cluster.yaml").read_text() == "mine\n"


def test_a_folder_that_is_not_there(world, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        described(world, tmp_path / "missing")


def test_what_was_found_as_data(world, tmp_path):
    world.silent = {"pc3"}
    data = json.loads(json.dumps(described(world, tmp_path, yes=True, force=True).to_json()))
    assert data["file"] == str(tmp_path / "cluster.yaml")
    assert [entry["fingerprint"] for entry in data["keys"]] == [fingerprint(key("pc1")), fingerprint(key("pc2")), None]
    assert data["failed"] == {"pc3": "pc3 does not answer; timed out"}
    assert data["network"]["name"] == "192.168.1.0/24"
    assert [host["name"] for host in data["cluster"]["hosts"]] == ["pc1", "pc2"]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        GOLDEN.write_text(described(World(hosts=home_lan()), Path(name)).text, encoding="utf-8")

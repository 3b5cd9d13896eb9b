"""The command of pdsh, compared as a whole, and what it says of hosts that it has lost."""

import shlex
from pathlib import PurePath

import pytest

from gangline.errors import UsageError
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.pdsh import PICK, PdshBackend
from gangline.runs.cluster import Cluster, Host
from tests.fakes.transport import FakeTransport


def launcher(*hosts, workdir="/srv"):
    hosts = tuple(
        Host(name=f"pc{number}", workdir=workdir, python="python3", **host) for number, host in enumerate(hosts, 1)
    )
    parts = tuple(
        HostRequest(host=host.name, folder=f"{workdir}/{host.name}/a", rank_files="/srv/run", argv=(), env={})
        for host in hosts
    )
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=parts)
    return PdshBackend().launcher(Cluster(name="home", hosts=hosts), request)


def over_ssh(address, ssh=None, port=2222):
    return {"transport": "ssh", "address": address, "ssh": ssh, "ssh_port": port}


def test_one_pdsh_starts_the_agent_of_each_host_with_the_user_of_each():
    made = launcher(over_ssh("10.0.0.1"), over_ssh("10.0.0.2", "ada@10.0.0.2"))
    assert (made.host, made.folder, made.dialects) == ("pc1", "/srv/run/pdsh", ())
    assert made.argv == (
        *["pdsh", "-b", "-S", "-R", "ssh", "-f", "2", "-w", "10.0.0.1,ada@10.0.0.2", "exec", "python3", "-c"], shlex.quote(PICK), "%h",
        "10.0.0.1", "/srv/pc1/a", "10.0.0.2", "/srv/pc2/a",
    )  # fmt: skip
    assert made.env == {
        "PDSH_SSH_ARGS": "-a -x -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=30"
        " -o ServerAliveCountMax=40 -p 2222 -l%u %h",
        "GANGLINE_LAUNCHER": "/srv/run/pdsh",
    }


def test_on_one_computer_pdsh_uses_no_ssh():
    made = launcher({"transport": "local"}, {"transport": "local"})
    assert made.argv == (
        *["pdsh", "-b", "-S", "-R", "exec", "-f", "2", "-w", "pc1,pc2", "python3", "-c"], PICK, "%h",
        "pc1", "/srv/pc1/a", "pc2", "/srv/pc2/a",
    )  # fmt: skip
    assert made.env == {}


def test_a_percent_sign_in_a_folder_stays_one():
    made = launcher(over_ssh("10.0.0.1"), over_ssh("10.0.0.2"), workdir="/srv/50%h of it")
    assert "'/srv/50%%h of it/pc1/a'" in made.argv


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (over_ssh("10.0.0.2", port=22), r"their ssh ports differ"),
        (over_ssh("fd00::2"), r"its address is fd00::2; a colon has another meaning for pdsh"),
    ],
)
def test_hosts_that_one_pdsh_cannot_reach_are_refused(second, words):
    with pytest.raises(UsageError, match=words):
        launcher(over_ssh("10.0.0.1"), second)


LOG = """10.0.0.2: Host key verification failed.
10.0.0.1: all is well
pdsh@pc1: 10.0.0.2: ssh exited with exit code 255
"""


def test_a_lost_connection_is_told_with_what_ssh_said_and_others_are_not():
    made, head = launcher(over_ssh("10.0.0.1"), over_ssh("10.0.0.2")), FakeTransport("pc1")
    assert PdshBackend().lost_host(made, head) is None
    head.write(PurePath("/srv/run/pdsh/launcher.log"), LOG.encode())
    failure = PdshBackend().lost_host(made, head)
    assert failure.what == "pdsh on pc1 has no connection to 10.0.0.2"
    assert failure.seen.splitlines() == [LOG.splitlines()[0], LOG.splitlines()[2]]


@pytest.mark.parametrize("end", ["exited with exit code 127", "exited with exit code 1", "killed by signal 9"])
def test_the_end_of_what_ran_on_a_host_is_not_called_a_lost_connection(end):
    made, head = launcher(over_ssh("10.0.0.1"), over_ssh("10.0.0.2")), FakeTransport("pc1")
    log = f"10.0.0.2: sh: 1: exec: python3: not found\npdsh@pc1: 10.0.0.2: ssh {end}\n"
    head.write(PurePath("/srv/run/pdsh/launcher.log"), log.encode())
    failure = PdshBackend().lost_host(made, head)
    assert failure.what == "what pdsh on pc1 started on 10.0.0.2 has ended"
    assert (failure.seen, "keys" in failure.fix) == (log.strip(), False)
    assert "`ssh ADDRESS python3 --version` has to work" in failure.fix
    head.write(PurePath("/srv/run/pdsh/launcher.log"), (log + LOG.replace("0.2", "0.3")).encode())
    failure = PdshBackend().lost_host(made, head)
    assert failure.what == "pdsh on pc1 has no connection to 10.0.0.3"

"""The command of each make of MPI launcher, compared as a whole. Intel MPI's is as its reference has it: simulated."""

import pytest

from gangline.errors import RunFailed, UsageError
from gangline.launch.agents import AgentBackend
from gangline.launch.backend import HostRequest, HostStatus, JobLauncher, LaunchRequest
from gangline.launch.mpirun import HydraBackend, MpirunBackend
from gangline.runs.cluster import Cluster, Host
from tests.fakes.transport import FakeTransport

OPENMPI = (
    "mpirun --bind-to none --oversubscribe --mca plm_rsh_agent ssh --mca oob_tcp_keepalive_time 15"
    " --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3"
)
SSH = "-o BatchMode=yes -o ConnectTimeout=15 -l ada -p 2222"
NOTICES = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"
AGENTS = [
    f"python3 /srv/{name}/a/agent.pyz foreground below /srv/{name}/a" for name in ("pc1", "pc2")
]  # each host has a folder of its own


def launcher(*addresses, backend=MpirunBackend, **changes):
    hosts = tuple(
        Host(name=f"pc{number}", address=address, workdir="/srv", python="python3", **{
            "transport": "ssh", "ssh": f"ada@{address}", "ssh_port": 2222, **changes,
        })
        for number, address in enumerate(addresses, 1)
    )  # fmt: skip
    parts = tuple(
        HostRequest(host=host.name, folder=f"/srv/{host.name}/a", rank_files="/srv/run", argv=(), env={})
        for host in hosts
    )
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=parts)
    return backend().launcher(Cluster(name="home", hosts=hosts), request)


def test_each_make_starts_one_agent_per_host():
    made = launcher("10.0.0.1", "10.0.0.2")
    openmpi, intel, mpich = made.dialects
    assert made.argv == openmpi.argv
    assert (made.host, made.folder) == ("pc1", "/srv/run/mpirun")
    assert [each.mark for each in made.dialects] == ["Open MPI", "Intel(R) MPI", "HYDRA"]
    assert openmpi.argv == (
        *OPENMPI.split(), "--mca", "plm_rsh_args", SSH, "--mca", "oob_tcp_if_include", "10.0.0.1/32,10.0.0.2/32",
        *f"-np 1 --host 10.0.0.1 {AGENTS[0]} : -np 1 --host 10.0.0.2 {AGENTS[1]}".split(),
    )  # fmt: skip
    assert mpich.argv == tuple(
        "mpirun -genvnone -bind-to none -wdir / -localhost 10.0.0.1 -launcher ssh"
        " -launcher-exec /srv/run/mpirun/remote-shell -hosts 10.0.0.1:1,10.0.0.2:1"
        f" -n 1 {AGENTS[0]} : -n 1 {AGENTS[1]}".split()
    )
    assert mpich.env == {"HYDRA_LAUNCHER_EXTRA_ARGS": f"{SSH} {NOTICES}"}
    start = "mpirun -genvnone -genv I_MPI_PIN off -bootstrap ssh -bootstrap-exec /srv/run/mpirun/remote-shell"
    assert intel.argv == (
        *start.split(), "-bootstrap-exec-args", f"{SSH} {NOTICES}",
        *f"-hosts 10.0.0.1,10.0.0.2 -ppn 1 -n 1 {AGENTS[0]} : -n 1 {AGENTS[1]}".split(),
    )  # fmt: skip
    assert openmpi.remote_shell is None
    assert mpich.remote_shell == intel.remote_shell == "/srv/run/mpirun/remote-shell"


def test_on_one_computer_no_make_uses_ssh():
    made = launcher("127.0.0.1", "127.0.0.1", transport="local", ssh=None)
    words = [" ".join(each.argv) for each in made.dialects]
    assert "ssh_args" not in words[0]
    assert "-bootstrap fork -n 1" in words[1]
    assert "-launcher fork -hosts localhost:2 -n 1" in words[2]


def test_addresses_of_ipv6_are_for_openmpi_only():
    assert [each.mark for each in launcher("fd00::1", "fd00::2").dialects] == ["Open MPI"]


def test_the_program_of_the_other_backend_is_called_mpiexec_hydra():
    made = launcher("10.0.0.1", "10.0.0.2", backend=HydraBackend)
    assert {each.argv[0] for each in made.dialects} == {"mpiexec.hydra"}
    assert made.folder == "/srv/run/mpiexec.hydra"


def test_hosts_with_several_ssh_ports_are_refused():
    hosts = tuple(
        Host(name=name, address="10.0.0.1", workdir="/srv", python="python3", transport="ssh", ssh_port=port)
        for name, port in (("pc1", 22), ("pc2", 22), ("pc3", 2222))
    )
    parts = tuple(
        HostRequest(host=host.name, folder="/srv/a", rank_files="/srv/run", argv=(), env={}) for host in hosts
    )
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=parts)
    with pytest.raises(UsageError, match=r"mpiexec\.hydra cannot reach all hosts"):
        HydraBackend().launcher(Cluster(name="home", hosts=hosts), request)


def test_the_end_of_a_launcher_is_waited_for_where_its_agents_saw_it_first(monkeypatch):
    begun = HostRequest(host="pc1", folder="/srv/a", rank_files="/srv/run", argv=(), env={})
    launcher = JobLauncher(host="pc1", folder="/srv/run/mpirun", argv=("mpirun",))
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=(begun,), launcher=launcher)
    status = HostStatus(host="pc1", phase="ended", returncode=0, reason="unlaunched")
    monkeypatch.setattr(AgentBackend, "poll", lambda *_arguments: [status])
    backend, said = MpirunBackend(), [None, None, RunFailed("mpirun on pc1 was killed by signal 9", fix="look")]
    monkeypatch.setattr(backend, "failure", lambda *_arguments: said.pop(0))
    (found,) = backend.poll(request, {"pc1": FakeTransport("pc1")})
    assert (found.error["what"], found.returncode, said) == ("mpirun on pc1 was killed by signal 9", 1, [])

"""The backends mpirun (OpenMPI), mpiexec.hydra (MPICH) and pdsh on real hosts: the whole of a run, and the end of each of
its parts. Nothing is left on any host."""

import json

import pytest

from tests.lab.gang import Gang, assert_nothing_left, events

pytestmark = pytest.mark.lab("mpirun", "mpiexec.hydra", "pdsh")
DAEMONS = {"mpirun": "orted", "mpiexec.hydra": "hydra_pmi_proxy"}
NO_LOGIN = {
    "mpirun": ("mpirun on h0 ended with exit code", "Host key verification failed"),
    "mpiexec.hydra": ("mpiexec.hydra on h0 ended with exit code", "Host key verification failed"),
    "pdsh": ("pdsh on h0 ", "Host key verification failed", "`ssh ADDRESS true` has to work"),
}


@pytest.fixture(params=NO_LOGIN)
def backend(request):
    return request.param


@pytest.fixture
def gang(lab):
    return Gang(lab(3, meshed=True))


def launcher(gang, backend):
    return json.loads(gang.lab.hosts[0].read(f"{gang.attempt(None)}/{backend}/launcher.json"))["pid"]


def daemon(host, backend):
    """The pid of the launcher's daemon on a host, as it is counted there; under pdsh, of the sshd of its connection."""
    if backend == "pdsh":
        below = host.check(["pgrep", "-f", "foreground below"]).split()[0]
        return host.check(["ps", "-o", "ppid=", "-p", below]).strip()
    return host.check(["pgrep", "-x", DAEMONS[backend]]).strip()


def assert_ended(gang, words, *, skip=(), timeout_s=45.0):
    outcome = gang.outcome(timeout_s=timeout_s)
    assert outcome["result"] == "failed"
    assert words in outcome["error"]["what"]
    assert outcome["left"] == []
    assert outcome["unverified"] == list(skip)
    assert_nothing_left(gang.lab, folder=gang.folder, skip=skip)
    return outcome


def test_a_gang_is_started_followed_and_stopped_and_secrets_are_on_no_disk(gang, backend):
    gang.begin(backend=backend)
    now = gang.joined()
    assert (now["board"]["joined"], now["board"]["ranks"]) == (4, 4)
    assert gang.goes_on()
    words = gang.lab.hosts[0].check(["ps", "-eo", "args"])
    assert backend in words
    assert "hf_canary" not in words
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["error"], outcome["left"], outcome["unverified"]) == ("stopped", None, [], [])
    assert_nothing_left(gang.lab, folder=gang.folder)
    assert [host.run(["grep", "-rl", "hf_canary", gang.folder]).stdout for host in gang.lab.hosts] == ["", "", ""]


def test_a_killed_mpirun_ends_the_gang_in_good_order_and_is_named(gang, backend):
    gang.begin(backend=backend)
    gang.joined()
    gang.lab.hosts[0].check(["kill", "-9", str(launcher(gang, backend))])
    assert_ended(gang, f"{backend} on h0 was killed by signal 9")


def test_a_killed_daemon_of_mpirun_ends_the_gang_and_mpirun_is_named(gang, backend):
    gang.begin(backend=backend)
    gang.joined()
    gang.lab.hosts[1].check(["kill", "-9", daemon(gang.lab.hosts[1], backend)])
    assert_ended(gang, f"{backend} on h0 ")


def test_nothing_is_left_of_a_killed_mpirun_though_nobody_looks_after_the_run(gang, backend):
    gang.begin(backend=backend)
    gang.joined()
    gang.lab.user.call("tests.lab.cases_launch:kill_supervisor")
    gang.lab.hosts[0].check(["kill", "-9", str(launcher(gang, backend))])
    assert_nothing_left(gang.lab, folder=gang.folder, within_s=30)


@pytest.mark.slow
def test_a_killed_agent_is_named_and_what_it_had_started_is_ended(gang, backend):
    gang.begin(backend=backend)
    gang.joined()
    h1 = gang.lab.hosts[1]
    h1.check(["kill", "-9", str(gang.record(h1, "h1/agent.json")["pid"])])
    assert_ended(gang, "the gangline agent on h1 died; its ranks were stopped")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["kill", "power_off"])
def test_a_lost_host_is_named_and_the_others_leave(gang, backend, how):
    if (backend, how) == ("pdsh", "power_off"):
        pytest.skip("pdsh goes on with the others: the next test")
    gang.begin(backend=backend)
    gang.joined()
    getattr(gang.lab.hosts[2], how)()
    assert_ended(gang, "h2 does not answer", skip=["h2"], timeout_s=180)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_below_pdsh_the_others_go_on_without_a_host_that_has_lost_power_and_stop_ends_pdsh_too(gang):
    gang.begin(backend="pdsh")
    gang.joined()
    gang.lab.hosts[2].power_off()
    gang.until(lambda now: "unreachable" in events(now), "the silence is told of")
    assert gang.goes_on()
    gang.order("stop")
    outcome = gang.outcome(timeout_s=90)
    assert (outcome["result"], outcome["left"], outcome["unverified"]) == ("stopped", [], ["h2"])
    assert_nothing_left(gang.lab, folder=gang.folder, skip=["h2"], within_s=30)


def test_hosts_that_the_head_cannot_log_in_to_are_told_of_and_nothing_is_left(lab, backend):
    gang = Gang(lab(3))
    said = gang.call("begin", hosts=gang.hosts(), backend=backend)
    assert [words for words in NO_LOGIN[backend] if words not in said["error"]] == [], said["error"]
    assert_nothing_left(gang.lab, folder=gang.folder)


@pytest.mark.slow
def test_a_head_without_mpirun_says_so(lab, backend):
    gang = Gang(lab(3, meshed=True, special={"h0": {"hide": (backend,)}}))
    said = gang.call("begin", hosts=gang.hosts(), backend=backend)
    assert f"h0: {backend} cannot be started" in said["error"]
    assert_nothing_left(gang.lab, folder=gang.folder)

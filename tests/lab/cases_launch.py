"""What the user's computer of a lab does in tests of launching: it runs there, through `LabHost.call`."""

import contextlib
import dataclasses
import json
import os
import threading
import time
from pathlib import Path

from gangline.control.supervision import copy_records, hand_over, seen_from_head
from gangline.errors import GanglineError, HostUnreachable
from gangline.launch.backends import backend as named_backend
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import read_json
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record, write_record
from gangline.runs.state import RunState
from gangline.supervise import detached
from gangline.transport.connect import connect, connect_all
from tests.lab.settings import ROOT
from tests.saved import read_events

FAKE = ROOT / "tests" / "lab" / "fake_gang.py"
PORT = 29500
HOME = Path("~/home").expanduser()


def cluster_of(hosts, *, workdir, python, code=None, backend="direct"):
    """The cluster of `hosts`: name, address, host_key, ssh_port, slots of each."""
    made = []
    for host in hosts:
        known = {name: value for name, value in host.items() if name != "num_ranks"}
        made.append(Host(workdir=workdir, python=python, transport="ssh", code=code, **known))
    return Cluster(name="lab", hosts=tuple(made), backend=backend)


def gang_of(hosts, run_id, attempt=1):
    ranks = [GangRank(host=host["name"], share=1) for host in hosts for _ in range(host.get("num_ranks", 1))]
    return Gang(run_id=run_id, attempt=attempt, ranks=tuple(ranks))


def fake_request(cluster, gang, *, port=PORT, steps=0, program=None):
    """What our backend renders, with the fake gang in the place of torchrun."""
    request = named_backend(cluster.backend).render(cluster, gang, port=port, program=program)
    head = cluster.head
    parts = []
    for node, part in enumerate(request.hosts):
        words = {
            "node": node, "nodes": len(request.hosts), "meet": [head.address, port], "steps": steps,
            "local": cluster.host(part.host).address, "folder": part.rank_files, "ranks": part.ranks,
            "world": gang.world_size, "alone": part.alone,
            "control": f"{part.folder}/prefork" if part.warm_pool else None,
        }  # fmt: skip
        argv = ("python3", f"{cluster.head.workdir}/fake_gang.py", "launcher", json.dumps(words))
        parts.append(dataclasses.replace(part, argv=argv))
    return dataclasses.replace(request, hosts=tuple(parts))


def torch_request(cluster, gang, *, script, port=PORT):
    """What our backend renders, with a script on the hosts in the place of our worker."""
    request = named_backend(cluster.backend).render(cluster, gang, port=port)
    parts = [
        dataclasses.replace(part, argv=(*part.argv[: part.argv.index("gangline.worker") - 1], script, part.rank_files))
        for part in request.hosts
    ]
    return dataclasses.replace(request, hosts=tuple(parts))


def begin(
    hosts,
    run_id="calm-otter-7",
    keep="desk",
    workdir="gangline",
    port=PORT,
    script=None,
    python="python3",
    env=None,
    backend="direct",
):
    """Start a gang over ssh; `keep`: who looks after it. What went wrong, and how long it took."""
    transports = connect_all(cluster_of(hosts, workdir="/", python=python))
    folder = str(transports[hosts[0]["name"]].home() / workdir)
    code = f"{folder}/code" if keep == "head" else None
    hosts = [{**host, "env": env or {}} for host in hosts]
    cluster = cluster_of(hosts, workdir=folder, python=python, code=code, backend=backend)
    for transport in transports.values():
        with contextlib.suppress(HostUnreachable):
            transport.write(Path(folder, "fake_gang.py"), FAKE.read_bytes())
            if script:
                transport.write(Path(folder, "script.py"), script.encode())
    gang = gang_of(hosts, run_id)
    if script:
        request = torch_request(cluster, gang, script=f"{folder}/script.py", port=port)
    else:
        request = fake_request(cluster, gang, port=port)
    layout = RunLayout(HOME, run_id)
    layout.attempt(1).mkdir(parents=True)
    for path, value in ((layout.cluster, cluster), (layout.attempt_cluster(1), cluster), (layout.request(1), request)):
        write_record(path, value.to_json())
    RunState(name="fake").save(layout)
    begun = time.monotonic()
    try:
        if keep == "head":
            _begin_there(cluster, layout, transports[cluster.head.name])
        else:
            detached.spawn(layout.folder, 1, secrets={"HF_TOKEN": "hf_canary"})
        error = None
    except GanglineError as problem:
        error = str(problem)
    finally:
        for transport in transports.values():
            transport.close()
    return {"error": error, "seconds": time.monotonic() - begun, "folder": folder}


def _begin_there(cluster, layout, keeper):
    head, there = cluster.head, host_layout(cluster.head, layout.run_id)
    keeper.push(ROOT / "src" / "gangline", Path(head.code, "gangline"))
    seen = seen_from_head(cluster)
    assert detached.cannot_supervise(seen, keeper) == []
    documents = {layout.cluster: seen.to_json(), layout.attempt_cluster(1): seen.to_json()}
    hand_over(layout, there, keeper, attempt=1, documents=documents)
    detached.spawn_there(head, keeper, there, 1, secrets={"HF_TOKEN": "hf_canary"})


def reasons(hosts):
    """Why the head cannot look after a run."""
    with_home = connect(cluster_of(hosts, workdir="/", python="python3").head)
    code = f"{with_home.home()}/code"
    with_home.push(ROOT / "src" / "gangline", Path(code, "gangline"))
    cluster = cluster_of(hosts, workdir="/", python="python3", code=code)
    said = detached.cannot_supervise(seen_from_head(cluster), with_home)
    with_home.close()
    return said


def look(run_id="calm-otter-7", keep="desk", home=HOME):
    """Where a run stands. home: of the user."""
    layout = RunLayout(home, run_id)
    if keep == "head":
        cluster = load_record(layout.cluster, Cluster)
        keeper, there = connect(cluster.head), host_layout(cluster.head, run_id)
        copy_records(layout, there, keeper)
        (layout.folder / "events.jsonl").write_bytes(keeper.read(there.events))
        keeper.close()
    files = {name: layout.attempt(1) / f"{name}.json" for name in ("outcome", "board")}
    found = {name: read_json(path) if path.exists() else None for name, path in files.items()}
    state = read_json(layout.state)
    return {"state": state, "events": read_events(layout.events) if layout.events.exists() else [], **found}


def order(verb, run_id="calm-otter-7", keep="desk"):
    """`stop`, `kill`, `alive` or `unfinished`; how long it took, and the answer."""
    layout = RunLayout(HOME, run_id)
    keeper = None
    if keep == "head":
        cluster = load_record(layout.cluster, Cluster)
        keeper, layout = connect(cluster.head), host_layout(cluster.head, run_id)
    begun = time.monotonic()
    if verb == "alive":
        answer = detached.is_alive(layout, keeper)
    elif verb == "unfinished":
        answer = list(detached.unfinished(layout, keeper))
    else:
        answer = detached.stop_run(layout, verb, keeper)
    return {"answer": answer, "seconds": time.monotonic() - begun}


def kill_supervisor(run_id="calm-otter-7"):
    """kill -9 of the supervisor on this computer."""
    os.kill(RunState.load(RunLayout(HOME, run_id)).supervisor.pid, 9)


class Relay:
    """Attempts of a run, one after the other, by the backend alone."""

    def __init__(self, hosts, run_id):
        self.hosts, self.run_id, self.backend = hosts, run_id, DirectBackend()
        self.transports = connect_all(cluster_of(hosts, workdir="/", python="python3"))
        self.folder = str(self.transports[hosts[0]["name"]].home() / "gangline")
        for transport in self.transports.values():
            transport.write(Path(self.folder, "fake_gang.py"), FAKE.read_bytes())

    def start(self, attempt, names):
        hosts = [host for host in self.hosts if host["name"] in names]
        cluster = cluster_of(hosts, workdir=self.folder, python="python3")
        program = Program(rest_s=60.0, alone=attempt > 1)
        gang = gang_of(hosts, self.run_id, attempt)
        request = fake_request(cluster, gang, port=PORT + attempt, program=program)
        begun = time.monotonic()
        self.backend.start(request, self.transports)
        self.until(request, lambda each: each.signs is not None and _has_joined(each), "all ranks join")
        return request, time.monotonic() - begun

    def until(self, request, condition, what):
        deadline = time.monotonic() + 60
        while True:
            statuses = self.backend.poll(request, self.transports)
            if all(map(condition, statuses)):
                return statuses
            assert time.monotonic() < deadline, f"{what}: {statuses}"
            time.sleep(0.05)

    def host_agents(self, request):
        records = {
            part.host: self.transports[part.host].read(Path(part.folder, "agent.json")) for part in request.hosts
        }
        return {host: json.loads(record)["pid"] for host, record in records.items()}


def _has_joined(status):
    return bool(status.signs.ranks) and all(sign.phase in {"joined", "compute"} for sign in status.signs.ranks)


def relay(hosts, run_id="calm-otter-7", keep="desk"):
    """A rank is killed, the gang breaks off, the next attempt goes on without the last host; what was seen of it."""
    del keep
    run = Relay(hosts, run_id)
    names = [host["name"] for host in hosts]
    first, _ = run.start(1, names)
    before = run.host_agents(first)
    victim = first.hosts[1]
    pid = json.loads(run.transports[victim.host].read(Path(victim.rank_files, f"rank-{victim.ranks[0]}.pid")))["pid"]
    run.transports[victim.host].run(("kill", "-9", str(pid)))
    run.until(first.on({victim.host}), lambda each: bool(each.failures), "its end is told")
    run.backend.stop(first, run.transports, now=True, resting=True)
    rested = run.until(first, lambda each: each.rests, "all rest")
    left = run.backend.verify(first, run.transports)
    second, seconds = run.start(2, names[:-1])
    after = run.host_agents(second)
    old = {each.host: each.rests for each in run.backend.poll(first, run.transports)}
    left += run.backend.verify(first, run.transports)
    for request in (second, first):
        run.backend.stop(request, run.transports, now=True)
        run.until(request, lambda each: each.phase == "ended" and not each.rests, "it ends")
    for transport in run.transports.values():
        transport.close()
    return {
        "ended": {each.host: [each.reason, each.returncode] for each in rested},
        "same": [host for host in after if after[host] == before[host]],
        "rests": old,
        "left": [each.what for each in left],
        "seconds": seconds,
        "folder": run.folder,
    }


def compete(hosts, num_runs):
    """So many runs want the same slots of the same hosts at the same time; what each was told."""
    cluster = cluster_of(hosts, workdir="/", python="python3")
    transports = connect_all(cluster)
    folder = str(transports[hosts[0]["name"]].home() / "gangline")
    cluster = cluster_of(hosts, workdir=folder, python="python3")
    for transport in transports.values():
        transport.write(Path(folder, "fake_gang.py"), FAKE.read_bytes())
    said, gate = {}, threading.Barrier(num_runs)

    def start(number):
        request = fake_request(cluster, gang_of(hosts, f"run-{number}"))
        gate.wait()
        try:
            DirectBackend().start(request, transports)
            said[number] = "started"
        except GanglineError as error:
            said[number] = error.what

    threads = [threading.Thread(target=start, args=(number,)) for number in range(num_runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number, words in said.items() if words == "started"]
    for number in winners:
        request = fake_request(cluster, gang_of(hosts, f"run-{number}"))
        DirectBackend().stop(request, transports, now=True)
    for transport in transports.values():
        transport.close()
    return {"winners": winners, "said": sorted(set(said.values()))}

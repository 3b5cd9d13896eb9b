"""What the tests of sync do on the user's computer of a lab; see `LabHost.call`."""

import contextlib
import json
import os
import time
from pathlib import Path

from gangline.checks.judge import judge
from gangline.decide.inspect import with_building
from gangline.errors import GanglineError
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import gather
from gangline.provision import relay
from gangline.provision.code import place_code, place_project, verify_project
from gangline.provision.environment import compare_environments, place_environments
from gangline.provision.inputs import Inputs, bring_reads, distribute
from gangline.provision.relay import Cargo, bring
from gangline.provision.trees import here, look, look_everywhere, spot_on
from gangline.runs.cluster import Cluster, Environment, Host
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.transport.ssh import SshTransport
from tests.unit.provision.wheels import make_wheel


class Lines:
    """What was told."""

    def __init__(self):
        self.said = []

    def report(self, line):
        self.said.append(line)

    def progress(self, line):
        pass


@contextlib.contextmanager
def reached(hosts, **options):
    """A cluster of hosts of the lab, and transports to them."""
    made = [Host(**{"workdir": "", "python": "python3", "transport": "ssh", **options, **entry}) for entry in hosts]
    transports = {host.name: SshTransport(host) for host in made}
    homes = {name: transport.home() for name, transport in transports.items()}
    cluster = Cluster(
        name="kennel",
        hosts=tuple(Host(**{**_fields(host), "workdir": str(homes[host.name] / "gangline")}) for host in made),
    )
    try:
        yield cluster, transports
    finally:
        for transport in transports.values():
            transport.close()


def _fields(host):
    return {name: getattr(host, name) for name in Host.__slots__}


def code(hosts):
    """gangline's code on the hosts, run by their own Python."""
    with reached(hosts) as (cluster, transports):
        placed = place_code(cluster, transports)
        words = ("-c", "import gangline.runs.job, gangline; print(gangline.__file__)")
        ran = {
            host.name: transports[host.name].run(host.argv(*words), env=host.code_env).stdout.strip()
            for host in placed.hosts
        }
        pushed = []
        for transport in transports.values():
            transport.push = lambda *_words, **_options: pushed.append(1)
        place_code(cluster, transports)
        return {"ran": ran, "code": {host.name: host.code for host in placed.hosts}, "again": len(pushed)}


def spread(hosts, num_bytes):
    """A folder on all hosts; by which ways it came, and whether it is the same everywhere."""
    folder = Path.home() / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(num_bytes))
    (folder / "config.json").write_text("{}")
    with reached(hosts) as (cluster, transports):
        source = here(folder)
        targets = [spot_on(host, transports, f"{host.workdir}/models/m") for host in cluster.hosts]
        lines = Lines()
        delivery = bring(Cargo(what="model", source=source, tree=look(source)), targets, console=lines)
        again = bring(Cargo(what="model", source=source, tree=look(source)), targets)
        left = [
            transports[host.name].names(target.path.parent) for host, target in zip(cluster.hosts, targets, strict=True)
        ]
        trees = {tree.hash for tree in [look(source), *look_everywhere(targets)]}
    return {"hops": delivery.hops, "said": lines.said, "again": again.hops, "equal": len(trees) == 1, "left": left}


def tokens(hosts):
    """A token set of the head on all hosts; by which ways it came."""
    relay.SMALL_BYTES = 0
    with reached(hosts) as (cluster, transports):
        head = transports[cluster.head.name]
        folder = RunLayout(Path(cluster.head.workdir), "").token_set("feed")
        head.write(folder / "tokens.bin", b"tokens" * 1000)
        digest = look(spot_on(cluster.head, transports, folder / "tokens.bin")).files[""][1]
        document = {"files": {"tokens.bin": {"blake2b": digest}}}
        head.write(folder / "set.json", json.dumps(document).encode())
        lines = Lines()
        inputs = Inputs(train="feed", evaluation=None, model="m", record={})
        scratch = Path.home() / "scratch"
        served = distribute(cluster, transports, inputs, scratch=scratch, console=lines)
        return {"served": served, "said": lines.said, "left": [path.name for path in scratch.glob("*")]}


def locked(hosts):
    """The environment of a tiny lock, built on every host; what its Python says there."""
    shop = Path.home() / "shop"
    make_wheel(shop, "tiny_a", "1.0", needs="tiny_b")
    make_wheel(shop, "tiny_b", "2.0")
    os.environ.update(PIP_CONFIG_FILE="/dev/null", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(shop))
    lock = Path.home() / "my.lock"
    lock.write_text("tiny-a==1.0\ntiny_b==2.0\n")
    environment = Environment(kind="locked", path=str(lock))
    with reached(hosts, environment=environment) as (cluster, transports):
        try:
            placed = place_environments(
                cluster, Inventory(gathered="", hosts=()), transports, home=Path.home() / ".gangline"
            )
        except GanglineError as error:
            return {"error": str(error)}
        words = ("-c", "import sys, tiny_a, tiny_b; print(tiny_a.version, tiny_b.version, *sys.version_info[:2])")
        ran = {host.name: transports[host.name].run(host.argv(*words)).stdout.split() for host in placed.hosts}
        left = {host.name: transports[host.name].names(Path(host.workdir) / "wheelhouse") for host in placed.hosts}
        equal = [difference.line for difference in compare_environments(placed, transports)]
    return {"ran": ran, "left": left, "differences": equal}


def images(hosts, image):
    """The prefix of every host for one container image of podman, or the error."""
    with reached(hosts, environment=Environment(kind="podman", path=image)) as (cluster, transports):
        try:
            placed = place_environments(cluster, Inventory(gathered="", hosts=()), transports, home=Path.home())
        except GanglineError as error:
            return {"error": str(error)}
    return {host.name: list(host.prefix) for host in placed.hosts}


def judged(hosts):
    """What the checks say of hosts whose environment gangline builds, and what is there afterwards."""
    with reached(hosts, environment=Environment(kind="locked")) as (cluster, transports):
        begun = time.monotonic()
        inventory = with_building(cluster, gather(cluster, transports), transports)
        asked_s = time.monotonic() - begun
        findings = [[one.id, list(one.hosts), one.evidence] for one in judge(inventory, cluster, only=("E-SW-14",))]
        left = {host.name: transports[host.name].names(Path(host.workdir)) for host in cluster.hosts}
        begun = time.monotonic()
        with_building(cluster, inventory, transports)
        return {"findings": findings, "left": left, "asked_s": asked_s, "building_s": time.monotonic() - begun}


def project(hosts):
    """A folder of the user's on every host, and what is said after one byte of it changed on the last one."""
    folder = Path.home() / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')")
    (folder / "go.sh").write_text("#!/bin/sh\nexec python3 train.py\n")
    (folder / "go.sh").chmod(0o755)
    (folder / ".env").write_text("HF_TOKEN=canary")
    with reached(hosts) as (cluster, transports):
        placed = place_project(folder, cluster, transports)
        verify_project(placed, cluster, transports)
        ran = {
            host.name: transports[host.name]
            .run(("sh", "-c", 'cd "$1" && ./go.sh', "go", str(placed.folder(host))))
            .stdout
            for host in cluster.hosts
        }
        last = cluster.hosts[-1]
        there = placed.folder(last)
        names = {host.name: transports[host.name].names(placed.folder(host)) for host in cluster.hosts}
        transports[last.name].write(there / "train.py", b"print('hellO')")
        try:
            verify_project(placed, cluster, transports)
        except GanglineError as error:
            return {"ran": ran, "names": names, "error": error.what}
        return {"ran": ran, "names": names, "error": None}


def reads(hosts):
    """A model on all hosts and data on the head; where they lie there."""
    model, corpus = Path.home() / "tiny", Path.home() / "corpus.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    corpus.write_text('{"text": "x"}\n')
    data = DataJob(train=SourceJob(files=(str(corpus),)))
    job = Job(name="j", model=ModelJob(path=str(model)), data=data, batch=1, micro_batch=1)
    with reached(hosts) as (cluster, transports):
        found = bring_reads(job, cluster, transports, home=Path.home() / ".gangline")
        texts = [
            transports[host.name].read(Path(found.localised(job, host).model.path) / "model.safetensors").decode()
            for host in cluster.hosts
        ]
        (file,) = found.localised(job, cluster.head).data.train.files
        return {"models": found.models, "texts": texts, "data": transports[cluster.head.name].read(Path(file)).decode()}

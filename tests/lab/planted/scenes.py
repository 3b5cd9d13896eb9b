"""A scene: a small lab of healthy hosts, the environments on them, and the cluster file that describes them.

A plant is a function that takes a scene and does to it what went wrong at somebody's: to a host, or to the cluster file.

    @planted("L01", special={"h1": {"shm": "32m"}})
    def little_shared_memory(scene): ...

What stands in the decorator goes to `Lab`. Nothing is healed: every scene has a lab of its own.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.lab import gpus
from tests.lab.hosts import Lab
from tests.lab.planted import environments

FILE = "cluster.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """How one case is made."""

    name: str
    make: Callable[["Scene"], None]
    words: str
    num_hosts: int
    packages: Mapping[str, str] | None
    options: Mapping[str, object]
    spared: tuple[str, ...]
    """Hosts on which nothing is wrong, so that the finding may not name them."""


class Scene:
    """Hosts that nothing is wrong with, until the plant has had its turn."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.desk = lab.user
        self.hosts = lab.hosts
        self.file: dict = {
            "name": "planted",
            "environment": {"python": f"{environments.FOLDER}/bin/python"},
            "hosts": [
                {"name": host.name, "host_key": host.host_key, "address": host.address, "slots": 1}
                for host in lab.hosts
            ],
        }
        self.words: list[str] = []
        """More words of the command that looks at the hosts."""

    def __getitem__(self, name: str):
        return self.lab[name]

    def entry(self, name: str) -> dict:
        """What the cluster file says about a host; change it at will."""
        return next(entry for entry in self.file["hosts"] if entry["name"] == name)

    def shell(self, host, script: str, *, stdin: str = "") -> str:
        """Let the administrator of a host run a script there, which has to work."""
        return host.check(["sh", "-euc", script], stdin=stdin, as_root=True)

    def everywhere(self, script: str) -> None:
        """As `shell`, on all hosts."""
        for host in self.hosts:
            self.shell(host, script)

    def firewall(self, host, *rules: str) -> None:
        """A firewall in the usual manner: what belongs to a connection may pass, then the rules, in this order."""
        first = ("ct state established,related accept", "iif lo accept", "meta l4proto ipv6-icmp accept")
        lines = "\n".join(f"    {rule}" for rule in (*first, *rules))
        head = "type filter hook input priority 0; policy accept;"
        host.write("/etc/nftables.conf", f"table inet filter {{\n  chain input {{\n    {head}\n{lines}\n  }}\n}}\n")
        self.shell(host, "nft -f /etc/nftables.conf")

    def cards(self, name: str, cards: list[gpus.Gpu], **options: object) -> None:
        """Give a host these simulated cards, and as many slots."""
        gpus.install(self[name], cards, **options)
        self.entry(name)["slots"] = max(1, len(cards))

    def packages(self, name: str, packages: Mapping[str, str]) -> None:
        """Put other packages into the environment of a host."""
        environments.fill(self[name], packages)

    def write(self) -> None:
        """Put the cluster file where the user works."""
        self.desk.write(FILE, json.dumps(self.file, indent=2))


PLANTS: dict[str, Plant] = {}
HEALTHY: dict[str, Plant] = {}


SIZES = {"disk": "200g", "shm": "8g"}
"""Of a healthy host. They are bounds, not memory in use."""


def _register(book: dict[str, Plant], name: str, **values):
    options = {key: values.pop(key) for key in [*values] if key not in Plant.__dataclass_fields__}

    def decorate(make):
        assert name not in book, name
        words = (make.__doc__ or make.__name__.replace("_", " ")).strip()
        book[name] = Plant(name=name, make=make, words=words, options={**SIZES, **options}, **values)
        return make

    return decorate


def planted(name: str, *, num_hosts: int = 2, packages=environments.CPU, spared: tuple[str, ...] = (), **options):
    """Register the plant of a row of listed.py. packages: of the environment on all hosts; None: there is none."""
    return _register(PLANTS, name, num_hosts=num_hosts, packages=packages, spared=spared, **options)


def healthy(name: str, *, num_hosts: int = 2, packages=environments.CPU, **options):
    """Register a healthy variant."""
    return _register(HEALTHY, name, num_hosts=num_hosts, packages=packages, spared=(), **options)


@contextlib.contextmanager
def scene_of(plant: Plant) -> Iterator[Scene]:
    """The lab of a plant, with everything in place; it ends with the block."""
    with Lab(plant.num_hosts, **plant.options) as lab:
        scene = Scene(lab)
        if plant.packages is not None:
            for host in lab.hosts:
                environments.make(host, plant.packages)
        plant.make(scene)
        scene.write()
        yield scene

"""`gangline discover`: which hosts with sshd are on this computer's networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.options import AsJson, option
from gangline.cli.output import Terminal, print_data, print_json

if TYPE_CHECKING:
    from gangline.discovery.search import Discovery


def command(
    scan: Annotated[
        bool,
        typer.Option("--scan", help="try port 22 of every address of this computer's own networks, 1,022 at most"),
    ] = False,
    cluster: Annotated[Path | None, option("say which hosts are in this file; by default ./cluster.yaml")] = None,
    as_json: AsJson = False,
) -> None:
    """List hosts with sshd on this computer's networks, with their host keys. Nobody logs in; changes nothing.

    Asks the hosts that ssh_config, known_hosts, the neighbour table and mDNS know of. Scans only with --scan.
    """
    # the words of a cluster file cost 0.2 s, which --help does not pay
    from gangline.config.load import default_cluster, load_cluster
    from gangline.context import default_home
    from gangline.discovery.search import HEADER, discover, remarks, row
    from gangline.report.text_table import table

    console = Terminal()
    path = cluster or default_cluster(Path.cwd())
    members = load_cluster(path, home=default_home()) if path else None
    found = discover(scan=scan, cluster=members, console=console)
    console.clear()
    if as_json:
        print_json(found.to_json())
    else:
        print_data(table(HEADER, [row(host) for host in found.hosts]) if found.hosts else ["no host with sshd found"])
    for line in remarks(found):
        console.report(line)
    _say_next(found, "" if path is None else "--add " if cluster is None else f"--add -o {cluster} ")


def _say_next(found: Discovery, options: str) -> None:
    """The verbs that come next; options: those of `init`."""
    from gangline.discovery.search import spoken

    if found.unscanned:
        sys.stderr.write(f"To try port 22 of {spoken(found.unscanned)}: gangline discover --scan\n")
    new = [host.destination for host in found.offered if not host.in_cluster]
    if new:
        sys.stderr.write(f"Next, without the hosts that are not for training: gangline init {options}{' '.join(new)}\n")

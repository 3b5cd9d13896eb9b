"""The words of `cluster.yaml`: every key, its type, its default and what it is for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gangline.spec.fields import ADDRESS, Count, Name, NotNegative, OrNone, Section, Shorthand, Text

NONE = OrNone()
NO_SSH = "write `transport: local`, which trains on this computer; hosts over SSH are not built yet"


class HostWords(Section):
    """One machine. A bare name stands for `name`."""

    name: Annotated[Name, Field(examples=["my-pc"])]
    """What the host is called in plans, logs and folders. `localhost` and this computer's own name mean this one."""
    transport: Annotated[Literal["local"] | None, Field(json_schema_extra={"x-fix": NO_SSH})] = None
    """`local`: the host is this computer, whatever it is called. Several hosts may be."""
    workdir: Text | None = None
    """Folder on the host for everything that gangline writes there; left out: `hosts/<name>` in gangline's home."""
    python: Text | None = None
    """The Python that has gangline[train] installed; left out: the one that runs gangline here."""
    address: Annotated[str, Field(pattern=ADDRESS)] = "127.0.0.1"
    """Where the other hosts reach this one."""
    interface: Annotated[Name | None, NONE] = None
    """Network interface for the traffic between ranks; `none`: the system's choice."""
    slots: Count = 1
    """Ranks that run here: one for each GPU."""
    share: Annotated[NotNegative | None, NONE] = None
    """Speed of this host relative to the others: a host with 3 gets three times the work of one with 1.
    Give it for every host or for none; left out, all slots count the same."""
    slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """For trials: ranks here take this many times as long."""
    env: dict[Text, str | int | float | bool] = Field(default={})
    """Environment variables of the ranks here. Never a secret: this file is copied into the run."""


class ClusterWords(Section):
    """The machines of a run."""

    name: Name | None = None
    """What the cluster is called; left out: the name of the file."""
    hosts: Annotated[
        list[Annotated[HostWords, Shorthand("name")]],
        Field(min_length=1, examples=[[{"name": "my-pc", "transport": "local"}]]),
    ]
    """The hosts; the first is the head, which has rank 0."""

"""`gangline schema`: JSON Schema for editors."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from gangline.cli.output import print_data


class SchemaKind(str, Enum):
    """Which file the schema describes."""

    job = "job"
    cluster = "cluster"


def command(
    kind: Annotated[
        SchemaKind, typer.Argument(metavar="job|cluster", help="job.yaml or cluster.yaml")
    ] = SchemaKind.job,
) -> None:
    """Print the JSON Schema of job.yaml or cluster.yaml; editors check and complete the file with it."""
    from gangline.config.reference import cluster_schema, job_schema, schema_text

    schema = job_schema() if kind is SchemaKind.job else cluster_schema()
    print_data([schema_text(schema).rstrip()])

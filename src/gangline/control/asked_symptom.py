"""What `gangline explain --ask` puts its questions to: the records of a run, and its hosts as they are now."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gangline.context import REAL, Context, Dependencies, load_cluster, reached
from gangline.control.recorded_run import records_of_opened
from gangline.control.supervision import open_run
from gangline.decide.inspect import InspectOptions, inspect
from gangline.errors import GanglineError, HostKeyRefused
from gangline.inventory.measured import load_network
from gangline.provision.console import Console
from gangline.report.follow import board_lines, read_board
from gangline.report.run_summary import RunRecords
from gangline.report.symptom_questions import Evidence
from gangline.report.symptoms import SYMPTOMS, TAKEN_BY_A_RUN, Inquiry, inquire
from gangline.runs.cluster import Cluster
from gangline.units import fold_names


def put_questions(
    symptom: str,
    run: str | None,
    cluster_path: Path | None,
    *,
    home: Path,
    console: Console,
    deps: Dependencies = REAL,
) -> Inquiry:
    """Put the questions of a symptom to the records of a run, by the beginning of its id, and to its hosts as they are.

    Without a run: to the hosts of a cluster alone; where a run's hosts cannot be looked at, to its records alone.
    Changes nothing. Raises UsageError for a run that is not there, HostKeyRefused.
    """
    records: RunRecords | None = None
    start: list[str] = []
    reason = ""
    if run is None:
        cluster = load_cluster(cluster_path, home)
    else:
        console.progress(f"reading {run}")
        with open_run(run, home=home, deps=deps) as opened:
            records, cluster = records_of_opened(opened, samples=True), opened.cluster
            attempts = records.history.attempts
            board = read_board(opened.layout, attempts[-1].number) if attempts else None
        start = [] if board is None else board_lines(board)
        reason = "its hosts: the allocation has ended" if opened.is_over else ""
    if reason or not SYMPTOMS[symptom].findings:
        evidence = Evidence(unchecked=(reason,) if reason else ())
    else:
        try:
            with reached(cluster, home=home, console=console, deps=deps) as (cluster, context):
                evidence = _hosts_asked(symptom, cluster, context, records)
        except HostKeyRefused:
            raise
        except GanglineError as error:
            if records is None:
                raise
            evidence = Evidence(unchecked=(f"its hosts: {error.what}",))
    return inquire(symptom, dataclasses.replace(evidence, run=records, start=tuple(start)))


def _hosts_asked(symptom: str, cluster: Cluster, context: Context, run: RunRecords | None) -> Evidence:
    """What hosts say now. A run that trains on them is not disturbed by traffic, and not accused of itself."""
    asked, lives = SYMPTOMS[symptom], run is not None and not run.history.run.ended
    options = InspectOptions(
        tier="quick" if lives else asked.tier, only=asked.findings, own_worker=run is None or run.own is None
    )
    inspection = inspect(cluster, options, context, silent=True)
    ours = [each for each in inspection.findings if each.id.startswith(asked.findings)]
    silent = [each for each in inspection.findings if each.id.startswith("E-ACC-") and each not in ours]
    return Evidence(
        findings=tuple(each for each in ours if not (lives and each.id in TAKEN_BY_A_RUN)),
        hosts=tuple(facts.host for facts in inspection.inventory.hosts),
        unchecked=(
            *(f"{fold_names(each.hosts)} {each.title}" for each in silent),
            *(f"{row.what}: {row.why}" for row in inspection.skipped if row.what != "shared folder"),
        ),
        network=load_network(context.home, cluster),
    )

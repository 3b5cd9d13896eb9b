"""Everything that is recorded of a run, for verbs that tell of whole runs."""

from __future__ import annotations

from pathlib import Path

from gangline.context import REAL, Dependencies
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import CommandRecord
from gangline.provision.trees import host_layout
from gangline.report.run_summary import RunRecords, read_records, with_samples


def recorded_run(prefix: str, *, home: Path, samples: bool = False, deps: Dependencies = REAL) -> RunRecords:
    """Read a run, by the beginning of its id; silent hosts leave gaps. Raises UsageError, HostKeyRefused.

    samples: also what its hosts did meanwhile.
    """
    with open_run(prefix, home=home, deps=deps) as opened:
        return records_of_opened(opened, samples=samples)


def records_of_opened(opened: RunHandle, *, samples: bool = False) -> RunRecords:
    """The same of a run that is open."""
    own = CommandRecord.of(opened.layout)
    records = read_records(
        opened.view(),
        records=opened.records,
        remote=opened.supervisor_host,
        own=None if own is None else own.words,
        can_resume=own is None or own.resume_words is not None,
    )
    hosts = opened.cluster.hosts if samples else ()
    names = [(host.name, opened.transports[host.name], host_layout(host, opened.layout.run_id)) for host in hosts]
    return with_samples(records, names)

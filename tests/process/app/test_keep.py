"""What this computer knows of a run that its head keeps."""

import dataclasses
import json

from gangline.control.supervision import RunHandle, SupervisorRecord
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import ProcessId, RunState
from tests.fakes.transport import FakeTransport

HEAD = Host(name="pc1", workdir="/srv", python="python3", transport="ssh")


def encoded(phase):
    state = RunState(name="tiny", phase=phase, supervisor=ProcessId(pid=4711, start_ticks=1))
    return json.dumps(dataclasses.asdict(state)).encode()


class EndsMeanwhile(FakeTransport):
    """Its supervisor writes the end and leaves after the first look at its state."""

    def read(self, path, **how):
        data = super().read(path, **how)
        if path.name == "state.json":
            self.files[path] = encoded("finished")
        return data


def test_a_run_that_ends_between_two_looks_is_not_lost(tmp_path):
    layout = RunLayout(tmp_path, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    write_json(layout.state, json.loads(encoded("running")))
    keeper = EndsMeanwhile("pc1")
    run = RunHandle(
        layout=layout,
        cluster=Cluster(name="home", hosts=(HEAD,)),
        transports={"pc1": keeper},
        supervisor=SupervisorRecord(host="pc1"),
    )
    keeper.files[run.records.state] = encoded("running")
    assert run.record().phase == "finished"

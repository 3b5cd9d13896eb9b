"""The name of an endpoint is one endpoint's, from its start on. Here no process is started: a lock stands for one."""

import fcntl

import pytest

from gangline.control.served_endpoints import (
    EndpointState,
    ServeRequest,
    begin_endpoint,
    find_endpoint,
    list_endpoints,
    stop_endpoint,
)
from gangline.errors import RecordError, UsageError
from gangline.provision.console import SILENT
from gangline.runs.layout import EndpointLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import ProcessId

ASKED = ServeRequest(target="/models/tiny", name=None, options=())


@pytest.fixture
def starting(tmp_path):
    """The files of an endpoint whose process has not yet said where it stands, and its lock."""
    layout = EndpointLayout(tmp_path, "serve-tiny")
    layout.folder.mkdir(parents=True)
    with layout.log.open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write("loading\n")
        log.flush()
        yield layout, log


@pytest.mark.parametrize("name", ["org/tiny", "../tiny", "a\nb", "x" * 300])
def test_a_name_that_is_none_for_a_folder_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(UsageError, match=r"an endpoint cannot be called") as caught:
        begin_endpoint(ASKED, name, home=tmp_path, console=SILENT)
    assert "--name" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_that_is_starting_keeps_its_name(starting, tmp_path):
    layout, _ = starting
    with pytest.raises(UsageError, match=r"serve-tiny is starting already"):
        begin_endpoint(ASKED, "tiny", home=tmp_path, console=SILENT)
    assert layout.log.read_text() == "loading\n"
    with pytest.raises(UsageError, match=r"serve-tiny is starting"):
        stop_endpoint(layout)


def test_an_endpoint_that_died_before_it_said_anything_has_its_log_and_can_be_taken_away(starting, tmp_path):
    layout, log = starting
    log.close()
    assert find_endpoint(tmp_path, "serve-tiny") == layout
    assert "off the list" in stop_endpoint(layout)
    assert find_endpoint(tmp_path, "serve-tiny") is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"phase": 7}'])
def test_a_damaged_record_hides_no_other_endpoint_and_is_named(starting, tmp_path, text):
    layout, log = starting
    layout.state.write_text(text)
    whole = EndpointLayout(tmp_path, "serve-other")
    whole.folder.mkdir()
    process = ProcessId(pid=0, start_ticks=0)
    write_record(whole.state, EndpointState(target="other", process=process, phase="stopped").to_json())
    listed = dict(list_endpoints(tmp_path))
    assert {name: state.shown for name, state in listed.items()} == {"serve-tiny": "damaged", "serve-other": "stopped"}
    assert "state.json" in listed["serve-tiny"].cause.what
    with pytest.raises(RecordError, match=r"state\.json"):
        stop_endpoint(layout)  # its process may run: the lock says so
    log.close()
    assert "off the list" in stop_endpoint(layout)
    assert list(dict(list_endpoints(tmp_path))) == ["serve-other"]

"""A host whose disk is full: the start says so in three parts, and not that a host which answers does not."""

import errno
import json
import os

import pytest

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.direct import DirectBackend
from tests.fakes.transport import FakeTransport, Scripted

NOTHING = {"processes": [], "ports": [], "leases": [], "gpus": []}
REFUSED = {"what": "slots cannot be claimed: [Errno 28] No space left on device", "seen": "", "fix": ""}


class Full(FakeTransport):
    """Nothing can be written to it."""

    def write(self, path, data):
        del data
        raise OSError(errno.ENOSPC, f"{self.host}: {os.strerror(errno.ENOSPC)}", str(path))


def part(host):
    return HostRequest(host=host, folder=f"/srv/{host}", rank_files="/srv", argv=(), env={}, agent_argv=("host-agent",))


@pytest.mark.parametrize("left", [[], [{"pid": 7, "why": "its parent is the host agent", "command": "python"}]])
def test_a_host_agent_that_finds_no_room_is_named_with_what_to_do_and_what_is_left(left):
    def answer(call):
        if call.argv == ("host-agent",):
            return Scripted(returncode=1, stdout=json.dumps(REFUSED))
        return Scripted(stdout=json.dumps({**NOTHING, "processes": left}))

    hosts = {
        "pc1": FakeTransport("pc1", answer=lambda _call: Scripted(stdout=json.dumps(NOTHING))),
        "pc2": Full("pc2", answer=answer),
    }
    with pytest.raises(RunFailed, match=r"pc2: slots cannot be claimed: .* No space left on device") as caught:
        DirectBackend().start(LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(map(part, hosts))), hosts)
    first, *more = caught.value.seen.splitlines()
    assert first == "expected a running agent that holds the host's slots"
    assert more == [f"left on pc2: process {each['pid']} ({each['why']}): {each['command']}" for each in left]
    assert "does not answer" not in str(caught.value)
    assert caught.value.fix

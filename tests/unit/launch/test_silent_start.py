"""A host that falls silent while the gang is started is not waited for again and again."""

import pytest

from gangline.errors import HostUnreachable
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.direct import DirectBackend
from tests.fakes.transport import FakeTransport, Scripted


class Silent(FakeTransport):
    """Every call to it takes long, and is counted."""

    def __init__(self, host):
        super().__init__(host)
        self.reachable = False
        self.waits = 0

    def _need_host(self):
        self.waits += 1
        super()._need_host()


def test_it_is_waited_for_once_and_named(tmp_path):
    parts = [
        HostRequest(host=host, folder=f"/srv/{host}", rank_files="/srv", argv=(), env={}) for host in ("pc1", "pc2")
    ]
    nothing = '{"processes": [], "ports": [], "leases": [], "gpus": []}'
    answers = FakeTransport("pc1", answer=lambda _call: Scripted(stdout=nothing))
    silent = Silent("pc2")
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))
    with pytest.raises(HostUnreachable) as caught:
        DirectBackend().start(request, {"pc1": answers, "pc2": silent})
    assert silent.waits == 1
    assert caught.value.seen.endswith("left on pc2: pc2 does not answer")

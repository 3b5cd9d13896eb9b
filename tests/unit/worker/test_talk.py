"""To which addresses a chat with an endpoint goes, and with what; an endpoint that ends in the middle of an answer."""

import socket
import threading

import pytest

from gangline.errors import HostUnreachable, UsageError
from gangline.worker.talk import Sampling, endpoint, without_controls


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://models.example/api/v1", "https://models.example/api/v1"),
    ],
)
def test_an_address_may_end_with_v1_or_not(typed, url):
    assert endpoint(typed, "key").url == url


def test_a_key_is_not_sent_in_the_open():
    with pytest.raises(UsageError, match=r"the key is not sent to pc2 over http"):
        endpoint("http://pc2:8000/v1", "key")
    assert endpoint("http://pc2:8000/v1", "").url == "http://pc2:8000/v1"


@pytest.mark.parametrize(
    "typed", ["ftp://pc2/v1", "http:///v1", "http://pc2/v1?x=1", "http://pc2:port/v1", "http://[::1/v1"]
)
def test_another_address_is_refused(typed):
    with pytest.raises(UsageError, match=r"is no address of an endpoint"):
        endpoint(typed, "")


def test_an_endpoint_cannot_steer_the_terminal():
    assert without_controls("tea\x1b[31m\n") == "tea[31m\n"


@pytest.fixture
def ends_after():
    """An endpoint that sends these bytes to whoever asks it once, and is gone."""
    served = []

    def begin(data):
        listening = socket.create_server(("127.0.0.1", 0))

        def serve():
            with listening, listening.accept()[0] as asking:
                asking.settimeout(20)
                asking.recv(1 << 16)
                asking.sendall(data)
                asking.shutdown(socket.SHUT_WR)
                while asking.recv(1 << 16):
                    pass

        served.append(threading.Thread(target=serve, daemon=True))
        served[-1].start()
        return endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", "")

    yield begin
    for thread in served:
        thread.join(20)


WORDS = b'data: {"choices": [{"delta": {"content": "tea"}}]}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (len(WORDS) + 9) + WORDS


def test_an_answer_that_breaks_off_is_an_error_in_our_words(ends_after):
    said = []
    with pytest.raises(HostUnreachable, match=r"does not answer") as caught:
        ends_after(CHUNKED).answer([], Sampling(), said.append)
    assert said == ["tea"]
    assert "look whether the endpoint still runs" in caught.value.fix


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9\x1b[31m\r\n", "SSH-2.0-OpenSSH_9[31m"),
        (b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n99\r\nstarting", "503 Busy: "),
    ],
)
def test_what_is_no_whole_answer_is_an_error_in_our_words(ends_after, data, seen):
    with pytest.raises(HostUnreachable, match=r"does not answer") as caught:
        ends_after(data).models()
    assert seen in caught.value.seen

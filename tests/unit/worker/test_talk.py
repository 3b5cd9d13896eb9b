"""To which addresses a chat with an endpoint goes, and with what."""

import pytest

from gangline.errors import UsageError
from gangline.worker.talk import endpoint, without_controls


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


@pytest.mark.parametrize("typed", ["ftp://pc2/v1", "http:///v1", "http://pc2/v1?x=1"])
def test_another_address_is_refused(typed):
    with pytest.raises(UsageError, match=r"is no address of an endpoint"):
        endpoint(typed, "")


def test_an_endpoint_cannot_steer_the_terminal():
    assert without_controls("tea\x1b[31m\n") == "tea[31m\n"

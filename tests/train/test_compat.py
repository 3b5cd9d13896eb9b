"""The private names that gangline takes are in the installed libraries; `make versions` asks others, too."""

from tests.train import cases_compat


def test_every_private_name_is_there(zygote):
    assert zygote.fork(cases_compat.missing).result() == []

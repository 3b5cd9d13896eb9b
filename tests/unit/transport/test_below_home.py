"""Paths that begin with a home folder."""

from pathlib import PurePath

import pytest

from gangline.transport.transport import below_home


@pytest.mark.parametrize(("path", "meant"), [("~/a/b", "/home/me/a/b"), ("/a/~/b", "/a/~/b"), ("~other/a", "~other/a")])
def test_only_the_users_own_home_is_meant(path, meant):
    assert below_home(path, PurePath("/home/me")) == meant

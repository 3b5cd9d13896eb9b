"""The hosts that init offers: those that the user's ssh_config names one by one."""

import pytest

from gangline.discovery.sources import config_hosts


def hosts(folder, text):
    (folder / "config").write_text(text)
    return config_hosts(folder / "config")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Host pc1\n HostName 10.0.0.1\nHost pc2 pc3\n", ["pc1", "pc2", "pc3"]),
        ("host=pc1\nHOST = pc2\nHost\tpc3 # the old one\n", ["pc1", "pc2", "pc3"]),
        ("Host *\n User alice\nHost pc? !pc9 pc1\n", ["pc1"]),
        ("Match host pc1\n User alice\nHost pc2\nHost pc2\n", ["pc2"]),
        ("# Host pc1\n\n  Host pc2\n", ["pc2"]),
        ('Host "pc1" \'pc 2\' "pc3\n', []),
        ("Host \"pc1\" 'pc 2'\n", ["pc1"]),
        ("Host -oProxyCommand=x pc1;reboot pc\x1b[2J alice@pc1\n", ["alice@pc1"]),
        ("IdentityFile ~/.ssh/a=b\nHost\n", []),
        ("", []),
    ],
)
def test_names_without_patterns_in_their_order(tmp_path, text, names):
    assert hosts(tmp_path, text) == names


def test_no_file_names_nobody(tmp_path):
    assert config_hosts(tmp_path / "config") == []


def test_included_files_count_where_they_stand(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "b").write_text("Host pc3\n")
    (tmp_path / "conf.d" / "a").write_text(f"Host pc2\nInclude {tmp_path}/more\n")
    (tmp_path / "more").write_text("Host more\n")
    assert hosts(tmp_path, "Host pc1\nInclude conf.d/* missing\nHost pc4\n") == ["pc1", "pc2", "more", "pc3", "pc4"]


def test_files_that_include_each_other_end(tmp_path):
    assert hosts(tmp_path, "Include config\nHost pc1\n") == ["pc1"]


def test_bytes_that_are_no_text_are_passed_over(tmp_path):
    (tmp_path / "config").write_bytes(b"Host pc1\nHost \xff\xfe\nHost pc2\n")
    assert config_hosts(tmp_path / "config") == ["pc1", "pc2"]

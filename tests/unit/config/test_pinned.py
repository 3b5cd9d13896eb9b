"""Host keys are put into a file that somebody wrote, and nothing else in it changes."""

import pytest

from gangline.config.document import pin_keys, read_document
from gangline.errors import SpecError

OLD = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
NEW = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIP/+/fz7+vn49/b19PPy8fDv7u3s6+rp6Ofm5eTj4uHg"

FILE = f"""\
# our lab
name:   lab      # as on the door
hosts:
- name: pc1      # under the desk
  host_key: {OLD}  # read on Monday
  slots: 2
-   ssh: alice@pc2   # the laptop
    name: pc2

  # the old one
- {{name: pc3,   host_key: '{OLD}', slots: 1}}
- {{ name: "pc4" , slots: 1 }}
- pc5
- name: pc6"""


def test_a_key_is_replaced_where_it_stands():
    pinned = pin_keys(FILE, "cluster.yaml", {"pc1": NEW, "pc3": NEW})
    assert pinned == FILE.replace(OLD, NEW)


def test_a_key_is_added_where_there_was_none():
    pinned = pin_keys(FILE, "cluster.yaml", {"pc2": NEW, "pc4": NEW, "pc5": NEW, "pc6": NEW})
    expected = FILE.replace("    name: pc2\n", f"    name: pc2\n    host_key: {NEW}\n")
    expected = expected.replace('"pc4" ,', f'"pc4", host_key: {NEW} ,')
    expected = expected.replace("- pc5\n", f"- {{name: pc5, host_key: {NEW}}}\n")
    assert pinned == expected + f"\n  host_key: {NEW}"


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        ("witness: nas", f"witness: {{name: nas, host_key: {NEW}}}"),
        ("witness:\n  name: nas\n  port: 23", f"witness:\n  name: nas\n  host_key: {NEW}\n  port: 23"),
        (f"witness: {{name: nas, host_key: {OLD}}}", f"witness: {{name: nas, host_key: {NEW}}}"),
    ],
)
def test_the_key_of_a_witness_is_written_as_well(words, pinned):
    assert pin_keys(f"hosts: [pc1]\n{words}\n", "c", {"nas": NEW}) == f"hosts: [pc1]\n{pinned}\n"


def test_lines_that_end_as_on_windows_still_do():
    text = "hosts:\r\n  - name: pc1 # here\r\n    slots: 2\r\n"
    assert pin_keys(text, "c", {"pc1": NEW}) == text.replace("here\r\n", f"here\r\n    host_key: {NEW}\r\n")


def test_a_json_file_stays_one():
    text = '{"hosts": [{"name": "pc1", "slots": 2}, "pc2"]}'
    pinned = pin_keys(text, "c.json", {"pc1": NEW, "pc2": NEW})
    assert (
        pinned
        == f'{{"hosts": [{{"name": "pc1", "host_key": "{NEW}", "slots": 2}}, {{"name": "pc2", "host_key": "{NEW}"}}]}}'
    )


def test_an_empty_key_is_filled_in():
    text = "hosts:\n  - name: pc1\n    host_key:\n    slots: 2\n"
    assert pin_keys(text, "c", {"pc1": NEW}) == text.replace("host_key:", f"host_key: {NEW}")


def test_hosts_that_share_keys_keep_sharing_the_others():
    text = f"hosts:\n  - {{name: pc1, <<: &all {{port: 22, host_key: {OLD}}}}}\n  - {{name: pc2, <<: *all}}\n"
    values = read_document(pin_keys(text, "c", {"pc2": NEW}), "c").values
    assert [host["host_key"] for host in values["hosts"]] == [OLD, NEW]


@pytest.mark.parametrize(
    "text",
    [
        "hosts: [{<<: {name: pc1}}]",
        f"hosts: [&a {{name: pc1, host_key: {OLD}}}, {{<<: *a, name: pc2}}]",
    ],
)
def test_what_cannot_be_changed_for_one_host_alone_is_left_to_the_user(text):
    with pytest.raises(SpecError) as caught:
        pin_keys(text, "cluster.yaml", {"pc1": NEW})
    assert f"pc1: `host_key: {NEW}`" in caught.value.fix

"""`gangline top` over real hosts without a run: a cluster's cards, sums, and a host that goes off. The cards are simulated."""

import json

import pytest

from tests.lab import gpus
from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser

pytestmark = [pytest.mark.lab("gcc"), pytest.mark.timeout(240)]


def test_cards_and_sums_are_true_and_a_host_that_is_off_is_named(lab):
    made = lab(2, binds=lab_folders(), meshed=True)
    hot = gpus.like(gpus.H100, throttle=gpus.HOT_HARDWARE, temperature_c=91, ecc_uncorrected=7, utilization=80)
    gpus.install(made["h0"], [hot, gpus.RTX_3090])
    user = NewUser(made.user)
    user.types("init", "h0", "h1", "--yes")
    text = user.desk.read("cluster.yaml").decode()
    assert "h1" in text, text

    shown = user.types("top", "cluster.yaml", "--once").stdout
    words = " ".join(shown.split())
    assert "2 hosts on 1 machine 2 cards 104 GiB" in words, shown
    assert "GPU 0 NVIDIA H100 80GB HBM3 (simulated)" in words
    assert "91 C" in words
    assert "throttled 7 uncorrected memory errors" in words
    assert "driver 570.172.08 (simulated)" in words
    told = json.loads(user.types("top", "cluster.yaml", "--json").stdout)
    assert told["hosts"][0]["figures"]["gpu/0/utilization_percent"] == 80
    assert told["hosts"][1]["cards"] == []

    made["h1"].power_off()
    on, off = json.loads(user.types("top", "cluster.yaml", "--json").stdout)["hosts"]
    assert (on["silent"], on["figures"]["gpu/0/temperature_c"]) == (None, 91)
    assert off["silent"]
    assert off["figures"] == {}

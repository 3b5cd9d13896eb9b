"""Measured speeds as files: found again, by host first, and nothing that is not ours."""

import dataclasses

import pytest

from gangline.inventory.measured import find_profile, load_profiles, profile_path, save_profile
from gangline.planner.calibration import Profile, ProfileKey
from gangline.planner.speed import ComputeModel

KEY = ProfileKey(
    gpu="NVIDIA GeForce RTX 4090",
    driver="570.1",
    torch="2.13.0",
    kernels="sdpa",
    method="lora r16 all-linear fp32 adamw",
    dtype="bf16",
    architecture="0123456789abcdef",
)


def profile(host="pc1", day=1, key=KEY):
    return Profile(
        key=key, measured=f"2026-01-0{day}T00:00:00+00:00", host=host, compute=ComputeModel(per_token_s=day * 1e-5)
    )


def test_what_was_measured_is_found_again(tmp_path):
    path = save_profile(tmp_path, profile())
    assert path == profile_path(tmp_path, profile()) == tmp_path / "profiles" / f"{KEY.name}-pc1.json"
    assert load_profiles(tmp_path) == [profile()]
    assert find_profile(load_profiles(tmp_path), KEY, host="pc1") == profile()


def test_the_newest_of_a_host_takes_the_place_of_an_earlier_one(tmp_path):
    for day in (1, 2):
        save_profile(tmp_path, profile(day=day))
    assert load_profiles(tmp_path) == [profile(day=2)]


def test_the_host_itself_comes_first_and_then_the_newest_of_the_same_card(tmp_path):
    for host, day in (("pc1", 1), ("pc2", 3), ("pc3", 2)):
        save_profile(tmp_path, profile(host=host, day=day))
    assert find_profile(load_profiles(tmp_path), KEY, host="pc1") == profile(host="pc1", day=1)
    assert find_profile(load_profiles(tmp_path), KEY, host="bought-tomorrow") == profile(host="pc2", day=3)
    assert find_profile(load_profiles(tmp_path), KEY) == profile(host="pc2", day=3)


def test_another_driver_or_method_is_no_answer_unless_nobody_asks(tmp_path):
    save_profile(tmp_path, profile())
    assert find_profile(load_profiles(tmp_path), dataclasses.replace(KEY, driver="999")) is None
    assert find_profile(load_profiles(tmp_path), dataclasses.replace(KEY, method="full fp32 adamw")) is None
    assert find_profile(load_profiles(tmp_path), dataclasses.replace(KEY, driver="", torch="", kernels="")) == profile()


def test_a_processor_speaks_for_its_own_host_only(tmp_path):
    cpu = dataclasses.replace(KEY, gpu="cpu", driver="")
    save_profile(tmp_path, profile(key=cpu))
    assert find_profile(load_profiles(tmp_path), cpu, host="pc1") == profile(key=cpu)
    assert find_profile(load_profiles(tmp_path), cpu, host="pc2") is None
    assert find_profile(load_profiles(tmp_path), cpu) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1, "host": 3}'])
def test_a_file_that_is_not_ours_is_as_none(tmp_path, text):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "x.json").write_text(text)
    assert load_profiles(tmp_path) == []
    assert find_profile(load_profiles(tmp_path), KEY) is None


def test_a_host_with_an_odd_name_stays_in_the_folder(tmp_path):
    assert save_profile(tmp_path, profile(host="../../pc")).parent == tmp_path / "profiles"

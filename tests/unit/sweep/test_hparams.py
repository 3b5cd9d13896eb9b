"""What a sweep writes for TensorBoard is read by TensorBoard's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.sweep.hparams import TrialEvents


def test_the_checksum_is_crc_32c() -> None:
    from gangline.sweep.hparams import _masked_crc

    crc = 0xE3069283  # of "123456789", as in RFC 3720's list of check values
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _masked_crc(b"123456789") == masked.to_bytes(4, "little")


def test_nothing_is_written_before_the_first_loss(tmp_path: Path) -> None:
    events = TrialEvents(tmp_path / "1", {"rate": "1"})
    events.losses({"10": None})
    assert not (tmp_path / "1").exists()
    events.losses({"10": None, "20": 1.5})
    (path,) = (tmp_path / "1").iterdir()
    size = path.stat().st_size
    events.losses({"10": None, "20": 1.5})
    assert path.stat().st_size == size


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_hyper_parameters_and_losses(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    events = TrialEvents(tmp_path / "1", {"rate": "1e-4", "method.kind": "lora", "packing": "true"})
    events.losses({"10": 2.5, "20": 2.25})
    events.losses({"10": 2.5, "20": 2.25, "30": 2.0})
    events.ended("finished")
    found = reader.EventAccumulator(str(tmp_path / "1"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("evaluation/loss")] == [(10, 2.5), (20, 2.25), (30, 2.0)]
    content = found.PluginTagToContent("hparams")
    start = hparams.HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["rate"].number_value == 1e-4
    assert start.hparams["method.kind"].string_value == "lora"
    assert start.hparams["packing"].bool_value is True
    end = hparams.HParamsPluginData.FromString(content["_hparams_/session_end_info"]).session_end_info
    assert end.status == 1

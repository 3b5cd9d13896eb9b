"""Event files for TensorBoard's HParams page: the point of every trial, and its evaluation losses, in one folder.

The supervisor of a sweep writes them, and it has neither torch nor tensorboard at hand, so the few messages that it
needs are encoded here. Formats: TFRecord (length, masked CRC-32C, data, masked CRC-32C) and the fields of
tensorboard/compat/proto/{event,summary}.proto, tensorboard/plugins/hparams/plugin_data.proto and
google/protobuf/struct.proto.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from gangline.sweep.points import read_number

START, END = "_hparams_/session_start_info", "_hparams_/session_end_info"
LOSS = "evaluation/loss"
STATUS = {"finished": 1, "failed": 2, "running": 3}
"""tensorboard.hparams.Status"""


class TrialEvents:
    """The event file of one trial; a later supervisor writes on in another one."""

    def __init__(self, folder: Path, point: Mapping[str, str]) -> None:
        """Nothing is written before the first loss."""
        self._folder, self._point = folder, point
        self._path: Path | None = None
        self._told: dict[str, float] = {}

    def losses(self, losses: Mapping[str, float | None]) -> None:
        """Write the losses that are new, by step; those that are not finite are left out."""
        fresh = {step: loss for step, loss in losses.items() if loss is not None and self._told.get(step) != loss}
        if not fresh:
            return
        self._append(_scalar(LOSS, int(step), loss) for step, loss in fresh.items())
        self._told.update(fresh)

    def ended(self, phase: str) -> None:
        """Write how the trial ended; one that was dropped or stopped has finished for TensorBoard."""
        status = STATUS["failed"] if phase == "failed" else STATUS["finished"]
        info = _varint_field(1, status) + _double(2, time.time())
        self._append([_plugin_event(END, _bytes(4, info))])

    def _append(self, events: Iterable[bytes]) -> None:
        records = list(events)
        if self._path is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = self._folder / f"events.out.tfevents.{time.time():.0f}.gangline.{time.monotonic_ns()}"
            version = _double(1, time.time()) + _text(3, "brain.Event:2")
            records = [version, _plugin_event(START, _bytes(3, _session(self._point))), *records]
        with self._path.open("ab") as stream:
            stream.write(b"".join(map(_record, records)))


def _session(point: Mapping[str, str]) -> bytes:
    """SessionStartInfo: hparams (a map of google.protobuf.Value) and the start."""
    entries = [_bytes(1, _text(1, key) + _bytes(2, _value(text))) for key, text in point.items()]
    return b"".join(entries) + _double(5, time.time())


def _value(text: str) -> bytes:
    """google.protobuf.Value: a number, a truth value or a text."""
    if text in {"true", "false"}:
        return _varint_field(4, int(text == "true"))
    number = read_number(text)
    return _text(3, text) if number is None else _double(2, number)


def _scalar(tag: str, step: int, value: float) -> bytes:
    """An Event with one simple value."""
    summary = _bytes(1, _text(1, tag) + _key(2, 5) + struct.pack("<f", value))
    return _double(1, time.time()) + _varint_field(2, step) + _bytes(5, summary)


def _plugin_event(tag: str, data: bytes) -> bytes:
    """An Event whose summary carries HParamsPluginData (version 0) and no value."""
    plugin = _bytes(1, _text(1, "hparams") + _bytes(2, data))
    return _double(1, time.time()) + _bytes(5, _bytes(1, _text(1, tag) + _bytes(9, plugin)))


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reflected
    return value


_TABLE = tuple(map(_table_entry, range(256)))

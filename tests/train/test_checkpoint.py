"""Parts on the disk, with real tensors: saved whole or not at all, loaded only as they were committed."""

import threading
import time
from pathlib import Path

import pytest
import torch

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.manifest import PART_FILE
from gangline.worker import checkpoint
from tests.train.parts import (
    DESCRIPTION,
    commit,
    like,
    load_part,
    part_and_digest,
    same_bits,
    saved,
    saver_in,
    some_tensors,
)

pytestmark = pytest.mark.train
LIMIT_S = 60


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_dtype_and_shape_comes_back_bit_for_bit_with_its_state(tmp_path, asynchronous):
    tensors = some_tensors()
    state = {"step": 100, "rate": 0.1 + 0.2, "samples": [1, 2], "evaluation_loss": 1.5, "nested": {"a": None}}
    saver = saver_in(tmp_path, asynchronous=asynchronous)
    saver.save(100, tensors, state)
    saver.wait()
    assert saver.failure is None
    part, digest = part_and_digest(tmp_path)
    template = like(tensors)
    assert load_part(part, template, digest=digest) == state
    assert [name for name in tensors if not same_bits(tensors[name], template[name])] == []
    assert sorted(path.name for path in part.parent.iterdir()) == ["part-pc1"]


@pytest.mark.parametrize("how", ["waits", "finishes"])
def test_who_waits_for_a_write_shows_meanwhile_that_it_lives(tmp_path, monkeypatch, how):
    beats = []
    saver = saver_in(tmp_path, asynchronous=how == "finishes", beat=lambda: beats.append(threading.get_ident()))
    monkeypatch.setattr(checkpoint, "BEAT_S", 0.02)
    write = saver._write_part

    def slowly(*part):
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(*part)

    deadline = time.monotonic() + LIMIT_S / 4
    monkeypatch.setattr(saver, "_write_part", slowly)
    saver.save(100, some_tensors(), {}, wait=how == "waits")
    saver.wait()
    assert len(beats) >= 3
    assert set(beats) == {threading.get_ident()}
    assert saver.failure is None
    assert not saver.busy


def test_parameters_that_need_gradients_are_filled_in_place(tmp_path):
    model = torch.nn.Linear(3, 2)
    part, digest = saved(tmp_path, tensors=dict(model.named_parameters()))
    other = torch.nn.Linear(3, 2)
    load_part(part, dict(other.named_parameters()), digest=digest)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad


def test_equal_state_gives_equal_files_wherever_and_whenever_it_is_written(tmp_path):
    files = [{path.name: path.read_bytes() for path in saved(tmp_path / name)[0].iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert str(tmp_path).encode() not in files[0][".metadata"]


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_staged_and_come_back(tmp_path):
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    expected = some_tensors()
    saver = saver_in(tmp_path)
    saver.save(100, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    saver.wait()
    assert saver.failure is None
    part, digest = part_and_digest(tmp_path)
    load_part(part, tensors, digest=digest)
    assert [name for name in expected if not same_bits(expected[name], tensors[name].cpu())] == []


@pytest.fixture
def gate(monkeypatch):
    """Holds writers at one point until it is opened."""

    class Gate:
        reached = threading.Event()
        opened = threading.Event()

        def __call__(self, point):
            if point == "save: folder made":
                self.reached.set()
                assert self.opened.wait(LIMIT_S)

    gate = Gate()
    gate.reached, gate.opened = threading.Event(), threading.Event()
    monkeypatch.setattr(disk, "at_point", gate)
    yield gate
    gate.opened.set()


def test_training_may_change_the_tensors_as_soon_as_save_returns(tmp_path, gate):
    tensors = some_tensors()
    state = {"step": 100, "losses": [1.0]}
    saver = saver_in(tmp_path)
    saver.save(100, tensors, state)
    assert gate.reached.wait(LIMIT_S)
    assert saver.busy
    for tensor in tensors.values():
        tensor.zero_()
    state["losses"].append(2.0)
    gate.opened.set()
    saver.wait()
    assert saver.saved.step == 100
    part, digest = part_and_digest(tmp_path)
    template = like(tensors)
    assert load_part(part, template, digest=digest)["losses"] == [1.0]
    assert torch.equal(template["model.fp32"], some_tensors()["model.fp32"])


def test_without_memory_for_a_copy_training_waits_until_all_is_on_the_disk(tmp_path, monkeypatch, caplog):
    tensors = some_tensors()
    left = iter([10**12, 10**12, checkpoint.SPARED_BYTES])  # for the first two
    monkeypatch.setattr(checkpoint, "available_bytes", lambda: next(left))
    saver = saver_in(tmp_path)
    saver.save(100, tensors, {})
    assert not saver.busy
    assert "step 100: memory does not suffice for a copy of the state; training waits for the disk" in caplog.text
    for tensor in tensors.values():
        tensor.zero_()
    part, digest = part_and_digest(tmp_path)
    template = like(tensors)
    load_part(part, template, digest=digest)
    expected = some_tensors()
    assert [name for name in expected if not same_bits(expected[name], template[name])] == []


def test_a_copy_of_a_gpus_tensor_takes_a_power_of_two(monkeypatch):
    class OnGpu:
        is_cuda, nbytes = True, 5000

    assert checkpoint.copy_bytes(OnGpu()) == 8192
    assert checkpoint.copy_bytes(torch.zeros(1250)) == 5000
    assert checkpoint.available_bytes() > 0


def test_a_second_save_waits_for_the_first_and_counts_the_wait(tmp_path, gate):
    saver = saver_in(tmp_path)
    saver.save(100, some_tensors(1), {})
    short_s = saver.stall_s
    assert gate.reached.wait(LIMIT_S)
    second = threading.Thread(target=saver.save, args=(200, some_tensors(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(LIMIT_S)
    saver.wait()
    assert saver.stall_s >= 0.2 > short_s >= 0
    assert disk.saved_steps(tmp_path) == [100, 200]
    part, digest = part_and_digest(tmp_path, 100)
    template = like(some_tensors())
    load_part(part, template, digest=digest)
    assert torch.equal(template["model.fp32"], some_tensors(1)["model.fp32"])


def test_there_is_no_thread_before_the_first_save(tmp_path):
    before = threading.active_count()
    saver = saver_in(tmp_path)
    saver.wait()
    assert threading.active_count() == before
    assert not saver.busy


def test_only_tensors_and_json_are_saved(tmp_path):
    saver = saver_in(tmp_path)
    with pytest.raises(TypeError, match="tensors only; not one: schedule"):
        saver.save(100, {"schedule": {"last": 1}}, {})
    with pytest.raises(TypeError):
        saver.save(100, some_tensors(), {"rate": object()})
    assert disk.saved_steps(tmp_path) == []


def test_retention_runs_before_a_save(tmp_path):
    saver = saver_in(tmp_path, keep_last=2, keep_best=True)
    for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0), (400, 4.0)):
        saver.save(step, some_tensors(), {"evaluation_loss": loss}, wait=True)
        commit(tmp_path, step)
    saver.save(500, some_tensors(), {}, wait=True)
    assert disk.saved_steps(tmp_path) == [200, 300, 400, 500]


def test_a_step_that_is_saved_again_loses_its_old_record_first(tmp_path):
    saved(tmp_path, tensors=some_tensors(1))
    commit(tmp_path, 100)
    saver = saver_in(tmp_path, description={**DESCRIPTION, "attempt": 2})
    saver.save(100, some_tensors(2), {}, wait=True)
    assert disk.choose({"pc1": disk.survey(tmp_path)}).step is None
    commit(tmp_path, 100)
    assert disk.choose({"pc1": disk.survey(tmp_path)}).step == 100


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", PART_FILE])
def test_a_flipped_byte_anywhere_is_named_and_nothing_is_loaded(tmp_path, name):
    part, digest = saved(tmp_path)
    data = (part / name).read_bytes()
    for place in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1}):
        for mask in (0x01, 0x80):
            (part / name).write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            template = like(some_tensors())
            with pytest.raises(CheckpointError) as caught:
                load_part(part, template, digest=digest)
            assert name in caught.value.seen
            assert caught.value.fix
            assert not any(tensor.any() for tensor in template.values())


def test_truncated_missing_and_added_files_are_named(tmp_path):
    part, digest = saved(tmp_path)
    for name in ("__0_0.distcp", ".metadata", "state.json", PART_FILE):
        data = (part / name).read_bytes()
        for damage in (lambda path, data=data: path.write_bytes(data[:-1]), Path.unlink):
            damage(part / name)
            with pytest.raises(CheckpointError) as caught:
                load_part(part, like(some_tensors()), digest=digest)
            assert name in caught.value.seen
            (part / name).write_bytes(data)
    (part / "__1_0.distcp").write_bytes(b"more")
    with pytest.raises(CheckpointError, match="not what was committed") as caught:
        load_part(part, like(some_tensors()), digest=digest)
    assert "__1_0.distcp is not listed" in caught.value.seen


def test_a_whole_part_of_another_save_is_refused(tmp_path):
    part, _ = saved(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_part(part, like(some_tensors()), digest="0" * 64)
    assert "part.json is not the one of the commit record" in caught.value.seen


def test_the_state_of_another_model_is_refused_with_every_difference(tmp_path):
    part, digest = saved(tmp_path, tensors={"a": torch.ones(2, 3), "b": torch.ones(4), "gone": torch.ones(1)})
    template = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="another model, method or precision") as caught:
        load_part(part, template, digest=digest)
    for words in (
        "missing in the checkpoint: new",
        "unknown to this job: gone",
        "a is float32 [2, 3] in the checkpoint and float32 [3, 2] in this job",
        "b is float32 [4] in the checkpoint and bfloat16 [4] in this job",
    ):
        assert words in caught.value.seen
    assert not template["b"].any()

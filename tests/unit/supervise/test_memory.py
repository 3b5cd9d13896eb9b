"""A rank that ran out of memory: what it had and needed, and what would fit."""

import pytest

from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.supervise.cause import of_memory
from gangline.supervise.next_attempt import Base, smaller_settings, words_of

GIB = 1 << 30
CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which "
    "1.00 GiB is free. Process 12 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 21.00 GiB "
    "memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
KERNEL = (
    "Memory cgroup out of memory: Killed process 4001 (python) total-vm:9812340kB, anon-rss:8388608kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:1000"
)


def failure(*, seen="", oom=None, code=-9):
    error = {"what": "rank 1 failed", "seen": seen, "fix": ""} if seen else None
    found = {"rank": 1, "host": "pc2", "pid": 4001, "time": 0.0, "exit": code, "ordered": False, "error": error}
    return {**found, **({} if oom is None else {"oom": oom})}


def oom(**more):
    return {"line": None, "cgroup": None, "limit_bytes": None, "memory_bytes": 32 * GIB, **more}


def plan(**more):
    """Half of what a rank needs goes with the micro-batch."""
    row = {"allocated_bytes": 20 * GIB, "process_bytes": 22 * GIB, "free_bytes": 23 * GIB, "persistent_bytes": 9 * GIB}
    return {"micro_batch": 8, "forecast": {"ranks": [{}, row | more]}}


def job(**more):
    return {
        "micro_batch": 8,
        "activation_checkpointing": False,
        "data": {"sequence_length": 1024},
        "method": {"kind": "lora"},
        **more,
    }


def test_other_ends_are_not_explained_here():
    assert of_memory(failure(), plan(), job()) is None
    assert of_memory(failure(seen="ValueError: no such column"), plan(), job()) is None


def test_a_gpu_without_room_what_it_held_and_the_micro_batch_that_would_fit():
    found = of_memory(failure(seen=CUDA), plan(), job())
    assert found.what == "rank 1 on pc2 ran out of GPU memory"
    assert "it asked for 2 GiB more; 1 GiB of 24 GiB were free" in found.seen
    assert "it held 20 GiB of tensors, 512 MiB in gaps" in found.seen
    assert "others, or the driver, held 2 GiB" in found.seen
    assert "the plan expected 22 GiB for it (11 GiB that stay, 11 GiB of activations)" in found.seen
    # it needed 23 GiB of 22: with half of it going with the samples, 4 of 8 need 17.2
    assert found.fix.startswith("in the job micro_batch: 4 (about 17.2 GiB), or activation_checkpointing: true")
    assert "data.sequence_length: 512 (about 17.2 GiB)" in found.fix


@pytest.mark.parametrize(("now", "smaller"), [(8, 4), (2, 1), (1, None)])
def test_the_micro_batch_to_go_on_with_is_told_to_programs_as_well(now, smaller):
    found = of_memory(failure(seen=CUDA), plan(), job(micro_batch=now))
    assert found.to_json()["micro_batch"] == smaller
    assert found.to_json()["kind"] == "OutOfMemory"


def test_that_it_may_go_on_so_by_itself_is_said_unless_it_does():
    assert "smaller_micro_batch: true" in of_memory(failure(seen=CUDA), plan(), job()).fix
    allowed = job(failures={"smaller_micro_batch": True})
    assert "smaller_micro_batch" not in of_memory(failure(seen=CUDA), plan(), allowed).fix
    assert "smaller_micro_batch" not in of_memory(failure(seen=CUDA), plan(), job(micro_batch=1)).fix


def test_the_kernel_killed_it():
    found = of_memory(failure(oom=oom(line=KERNEL, limit_bytes=10 * GIB)), plan(), job())
    assert found.what == "rank 1 on pc2 ran out of memory and was killed by its kernel"
    assert "it held 8 GiB; its control group may have 10 GiB; the kernel's log: Memory cgroup out" in found.seen
    # 22 GiB were planned: it had 8, and half of it stays
    assert "micro_batch: 1, which is not enough alone" in found.fix
    assert "gangline resume" in found.fix


def test_of_a_control_group_that_only_counts():
    found = of_memory(failure(oom=oom(cgroup="/user.slice/a.scope")), None, None)
    assert "the machine has 32 GiB for all programs" in found.seen
    assert "/user.slice/a.scope counted a process" in found.seen
    assert found.fix.endswith("else give the host fewer `slots`")


@pytest.mark.parametrize("words", ["MemoryError", "can't allocate memory: you tried to allocate 1073741824 bytes"])
def test_python_or_torch_got_no_more(words):
    found = of_memory(failure(seen=f"RuntimeError: {words}", code=5), None, job(micro_batch=1))
    assert found.what == "rank 1 on pc2 ran out of memory"
    assert ("1 GiB more" in found.seen) == ("bytes" in words)
    assert found.fix.startswith("in the job activation_checkpointing: true, or data.sequence_length: 512")


def test_what_the_job_has_already_is_not_proposed():
    whole = job(micro_batch=1, activation_checkpointing=True, data={"sequence_length": 256}, method={"kind": "full"})
    assert of_memory(failure(seen=CUDA), plan(), whole).fix.startswith("in the job method: lora, and start a new run")


@pytest.mark.parametrize(
    "damaged", [None, {}, {"forecast": None}, {"forecast": {"ranks": [{}]}}, plan(process_bytes="much")]
)
def test_a_plan_that_tells_nothing_leaves_the_figures_out(damaged):
    found = of_memory(failure(seen=CUDA), damaged, job())
    assert "foresaw" not in found.seen
    assert found.fix.startswith("in the job micro_batch: 4, or activation_checkpointing: true")


def test_a_plan_of_an_older_version_does_not_know_what_stays():
    found = of_memory(failure(seen=CUDA), plan(persistent_bytes=None), job())
    assert "the plan expected 22 GiB for it, of 23 GiB that were free" in found.seen
    assert "micro_batch: 4, or" in found.fix


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("tp", "the ranks of pc1 compute activations again from here on; the others go on as before"),
        (
            "pipeline",
            (
                "rank 0 on pc1 computes activations again from here on, "
                "rank 1 on pc1 computes activations again from here on; the others go on as before"
            ),
        ),
    ],
)
def test_who_recomputes_from_here_on_is_told_as_it_is(strategy, words):
    """Under tp the ranks of a host recompute together, and are named once."""
    job = Job(name="small", model=ModelJob(path="m"), data=DataJob(train=SourceJob()), batch=8, micro_batch=1)
    ranks = tuple(GangRank(host=host, share=8) for host in ("pc1", "pc1", "pc2", "pc2"))
    gang = Gang(run_id="calm-otter-7", attempt=1, ranks=ranks, strategy=strategy)
    base = Base(attempt=1, cluster=Cluster(name="two", hosts=()), gang=gang, networks={})
    errors = [{"rank": rank, "micro_batch": None, "activation_checkpointing": True} for rank in (0, 1)]
    assert words_of([smaller_settings(each, base, current=gang, job=job) for each in errors]) == words

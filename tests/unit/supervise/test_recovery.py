"""Where the time goes between a failure and the next step."""

from gangline.supervise.lost_hosts import Recovery


def test_every_stage_counts_from_the_one_before():
    times = iter([10.5, 11.0, 11.25, 13.0, 13.5])
    recovery = Recovery(10.0, clock=lambda: next(times))
    for stage in ("ended", "prepared", "started", "joined"):
        recovery.reach(stage)
    recovery.reach("step")
    stages = {"ended": 0.5, "prepared": 0.5, "started": 0.25, "joined": 1.75, "step": 0.5}
    assert recovery.to_json() == {"seconds": 3.5, "stages": stages}


def test_only_the_first_time_counts():
    times = iter([1.0, 5.0])
    recovery = Recovery(0.0, clock=lambda: next(times))
    recovery.reach("ended")
    recovery.reach("ended")
    assert recovery.to_json()["stages"] == {"ended": 1.0}

"""The gang of one attempt, and those that follow from it."""

from gangline.runs.gang import Gang, GangRank

GANG = Gang(run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=f"pc{n}", share=n) for n in (1, 2, 3)))


def test_the_work_of_a_host_that_is_lost_goes_to_the_others_in_proportion():
    gang = GANG.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.host, rank.share) for rank in gang.ranks] == [("pc1", 2), ("pc3", 4)]
    assert (gang.attempt, gang.resume_step) == (2, 40)


def test_of_smaller_micro_batches_everybody_does_more():
    gang = GANG.in_smaller(2, before=8)
    assert ([rank.share for rank in gang.ranks], gang.micro_batch) == ([4, 8, 12], 2)


def test_what_is_written_is_read(tmp_path):
    gang = GANG.in_smaller(1, before=2)
    gang.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == gang

"""A script of the user's own that fails is started again as often as its user has said; real torchrun, gloo."""

import json

from tests.train.story import make_user, write_cluster
from tests.web_sink import web

__all__ = ["web"]

SCRIPT = """
import pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
seen = pathlib.Path(f"seen-{rank}")
times = int(seen.read_text()) if seen.exists() else 0
seen.write_text(str(times + 1))
total = torch.ones(1)
dist.all_reduce(total)
print("rank", rank, "start", times + 1, "with", sys.argv[1:], "of", int(total), flush=True)
dist.barrier()
if rank == 1 and times < 2:
    sys.exit(3)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_script_that_fails_is_started_again_with_the_words_for_it(quick_python, tmp_path, web):
    user = make_user(tmp_path, python=quick_python)
    (user.folder / "mine").mkdir()
    (user.folder / "mine" / "mine.py").write_text(SCRIPT)
    write_cluster(user, "two", pc1={}, pc2={})
    (user.folder / "hook").write_text(web.url)
    (user.folder / "hook").chmod(0o600)
    words = (
        "--notify",
        "file:hook",
        "--dir",
        "mine",
        "--cluster",
        "two.yaml",
        "--restarts",
        "2",
        "--resume-flag=--resume",
        "--",
        "mine.py",
    )
    said = user.gangline("run", *words, "--lr", "1")
    run = said.out.split()[0]
    log = (user.at_host("pc1", run) / "attempts" / "3" / "rank-0.log").read_text()
    assert "rank 0 start 3 with ['--lr', '1', '--resume'] of 2" in log
    assert "start 1 with ['--lr', '1'] of 2" in (user.at_host("pc1", run) / "attempts" / "1" / "rank-0.log").read_text()
    assert "rank 1 on pc2 ended with exit code 3" in said.err
    (record,) = [each for each in user.runs() if each["id"] == run]
    assert (record["phase"], record["attempt"]) == ("finished", 3)
    assert json.loads((user.home / "runs" / run / "command.json").read_text())["restarts"] == 2
    assert [each["event"] for each in web.got] == ["finished"]
    assert user.wait_until_quiet() == []

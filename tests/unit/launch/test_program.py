"""The user's words become what every rank runs, or are refused."""

import pytest

from gangline.errors import UsageError
from gangline.launch.program import rank_words

PYTHON = "/opt/env/bin/python"


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        ("train.py --lr 1e-4", f"{PYTHON} train.py --lr 1e-4"),
        ("-m package.train --lr 1", f"{PYTHON} -m package.train --lr 1"),
        ("python train.py", f"{PYTHON} train.py"),
        ("python3.11 -u -m package.train", f"{PYTHON} -u -m package.train"),
        ("python train.py -m deepspeed.launcher.runner", f"{PYTHON} train.py -m deepspeed.launcher.runner"),
        ("/usr/bin/python3 train.py", "/usr/bin/python3 train.py"),
        ("./train.sh --fast", "./train.sh --fast"),
        ("accelerate env", "accelerate env"),
        ("tune ls", "tune ls"),
    ],
)
def test_scripts_and_modules_run_in_the_hosts_python_and_programs_as_they_are(words, rank):
    assert rank_words(tuple(words.split()), python=PYTHON) == tuple(rank.split())


@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nproc-per-node 2 train.py",
        "deepspeed train.py",
        "/opt/bin/deepspeed train.py",
        "accelerate launch train.py",
        "mpirun -n 4 python train.py",
        "srun python train.py",
        "python -m torch.distributed.run train.py",
        "python -u -m torch.distributed.launch train.py",
        "-m accelerate.commands.launch train.py",
        "/opt/env/bin/python3 -m deepspeed.launcher.runner train.py",
    ],
)
def test_what_would_start_ranks_itself_is_refused_with_what_to_do_instead(words):
    with pytest.raises(UsageError, match=r"starts ranks itself[\s\S]*gangline run -- train.py"):
        rank_words(tuple(words.split()), python=PYTHON)


@pytest.mark.parametrize("words", ["", "--lr 1", "-m"])
def test_what_is_no_program_is_refused(words):
    with pytest.raises(UsageError):
        rank_words(tuple(words.split()), python=PYTHON)

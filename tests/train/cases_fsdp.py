"""What the ranks do in test_fsdp."""

from __future__ import annotations

import torch.distributed as dist

from gangline.errors import GanglineError
from tests.train.small import make_job, make_session, make_world


def refused(*, precision: str, method: str):
    """Why such a session cannot be built."""
    try:
        make_session(
            make_job(precision=precision, method=method), make_world([5, 5], rank=dist.get_rank(), strategy="fsdp")
        )
    except GanglineError as error:
        return str(error)
    return "it was built"

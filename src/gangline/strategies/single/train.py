"""One rank, no exchange. Also the reference that other strategies are compared with."""

from gangline.worker.strategy import Strategy


class Single(Strategy):
    """Plain backward passes: all that the base does."""

    min_ranks = 1

"""Bring it there: a run's files, token sets and checkpoints to hosts that lack them, inside the work folder only."""

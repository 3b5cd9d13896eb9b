"""Supervise a run: one detached process starts the gang, watches it, commits checkpoints and restarts it."""

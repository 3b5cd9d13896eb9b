"""What does a verb do to a run? Start, stop, resume, list."""

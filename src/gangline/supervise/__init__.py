"""Keep it going: one detached supervisor per run starts the gang, watches it, commits checkpoints, ends it."""

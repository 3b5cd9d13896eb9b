"""The host agent: what it starts for one attempt, how that is watched, and how it ends."""

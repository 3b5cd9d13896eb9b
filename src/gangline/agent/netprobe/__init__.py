"""What this host can reach, and how fast."""

"""Why did it fail? What known words in logs mean, which failures are echoes of others, what findings stand for."""

"""One rank, no exchange."""

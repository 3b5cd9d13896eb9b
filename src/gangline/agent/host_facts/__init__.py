"""What this host is, has and allows."""

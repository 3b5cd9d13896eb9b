"""What is known? Figures of hardware, with their sources."""

"""What is there? What the hosts said of themselves. Standard library only."""

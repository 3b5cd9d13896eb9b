"""Where is it written? The run directory, and the plain data in it. Standard library only."""

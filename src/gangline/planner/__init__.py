"""What will happen? Pure decisions from what was asked and seen. Standard library only, no I/O."""

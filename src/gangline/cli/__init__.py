"""What do I type? One file per verb, and the table of them."""

"""The ranks of a host have the columns and rows of every layer between them."""

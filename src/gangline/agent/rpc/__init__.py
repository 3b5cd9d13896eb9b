"""Requests of the controller: one connection, many requests at once."""

"""Hosts train apart for some steps, then move to the mean."""

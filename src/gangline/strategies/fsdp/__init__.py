"""Weights are divided among all ranks (fsdp) or those of a host (hsdp)."""

"""The kit for a machine with GPUs that is at hand for minutes, and may have no network: `python -m benchmarks.gpu`."""

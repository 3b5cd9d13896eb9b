"""What a training step takes in memory, found by running the real trainer on fake tensors: no weights, no GPU."""

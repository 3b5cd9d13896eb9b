"""Use the model: find what a run saved, export it, talk with it."""

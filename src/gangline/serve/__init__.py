"""Use the model: find the checkpoint of a run, export it, chat with it, serve it."""

"""How the gradient of one batch comes about: on one rank alone, or over several."""

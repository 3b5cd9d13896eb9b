"""gangline: hitch the machines you have to one training run."""

__version__ = "0.1.0"

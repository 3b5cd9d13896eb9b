"""The part that lives on a host. Standard library only, Python >= 3.8, started by `python -m`, imported by nobody."""

"""The part on a host. Standard library only, Python >= 3.8. Transports share its code for files and frames."""

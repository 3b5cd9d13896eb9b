"""Every rank has some of the layers."""

"""Every rank has the whole model, and gradients are summed."""

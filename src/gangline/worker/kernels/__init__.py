"""Kernels in place of torch's own operators: which are put into the model of a run, and why others are not.

A kernel is a row of `gangline.kernel_table.KERNELS` and a module here with two functions:

    obstacle(place) -> str    why it cannot be had there, as the end of "it needs ..."; "" where it works
    put_in(place) -> list     put it into the model; for each place what takes it out again

Whether it fits a module is tried on a few numbers, forward and backward, on the device of the run, and not looked up in
a list of models. All ranks take the same ones.
"""

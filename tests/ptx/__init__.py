"""A PTX executor in NumPy: runs the kernels' sm_90a, sm_100a and sm_103a code where there is no GPU."""

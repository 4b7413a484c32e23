"""The fast implementation of the model: the same parameters under the same names, computed by the kernels below."""

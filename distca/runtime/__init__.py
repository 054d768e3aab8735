"""Plans executed: exchanges, kernels, autograd."""

"""How XLA is expected to lay a flat program out on a GPU: which kernels, in which order, which buffers live when."""

"""One module per device kind: memory, streams and kernels. Nothing about ranks."""

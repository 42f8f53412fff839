"""What all kernels share: operands, decoding of codes, choice of an implementation, costs."""

"""Kernels of the causal convolution in Triton."""

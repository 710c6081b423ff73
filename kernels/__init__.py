"""Attention over a KV cache: the reference, the Triton kernels, the caches."""

"""Fused operations and tuned GEMMs: what torch.compile neither fuses nor chooses by itself.

NAME.py holds an operation, its gradient, and its reference implementation in PyTorch, which runs on CPUs and which
tests compare the kernel with. NAME_triton.py holds the Triton kernel for NVIDIA GPUs and is imported on first use.
GEMMs run in cuBLASLt (`cublaslt.py`, `gemm.py`).

Except for the GEMMs, nearly all of these operations are memory-bound: a GPU computes faster than it reads and writes,
so the time of a kernel is about the bytes that it moves, divided by the bandwidth. Fusing operations into one kernel
means that intermediate results stay in registers instead of going through memory. The docstrings therefore count bytes;
`e` is the size of an element of the activations, 2 bytes in bf16. Inside the kernels, activations are computed in fp32.

A rule for kernels inside models: before torch.compile inlines a kernel, it asks Triton which tensors the kernel writes,
and some releases pass every scalar as a constant for that. If the kernel does not compile this way, torch.compile
assumes that it mutates all of its tensors and copies them. Hence `tl.cast(scalar, ...)`, not `scalar.to(...)`.
"""

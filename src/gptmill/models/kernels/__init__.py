"""Passes over memory that torch.compile does not fuse by itself, each an operation with two implementations.

NAME.py holds the operation, its gradient, and its plain twin in PyTorch, which serves the CPU and which tests compare
with; NAME_triton.py the kernel for NVIDIA GPUs, imported when it is first used.
"""

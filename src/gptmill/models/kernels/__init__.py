"""What torch.compile does not fuse or choose by itself, each an operation with two implementations.

NAME.py holds the operation, its gradient, and its plain twin in PyTorch, which serves the CPU and which tests compare
with; NAME_triton.py the kernel for NVIDIA GPUs, imported when it is first used. Matmuls are those of NVIDIA's library.

torch.compile looks into the blocks' kernels. Before it does, it asks Triton which tensors a kernel writes to, with all
numbers taken for constants by some releases; of a kernel that does not compile so, it copies every tensor:
`tl.cast(number, ...)`, not `number.to(...)`.
"""

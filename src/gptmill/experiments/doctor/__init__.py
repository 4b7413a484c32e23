"""gptmill doctor: tries out what training needs of a machine. What may crash or hang is tried in child processes.

Only the modules `torch_probes` and `gpu_probes` import torch, and only the children import them: a broken torch is a
finding too.
"""

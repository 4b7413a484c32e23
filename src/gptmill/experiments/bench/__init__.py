"""gptmill bench: training throughput of a recipe on this machine, and an ablation of the optimizations."""

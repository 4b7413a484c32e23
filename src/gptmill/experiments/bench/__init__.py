"""gptmill bench: how fast a recipe trains on this machine, and what each optimization brings."""

"""The loop and what only it needs."""

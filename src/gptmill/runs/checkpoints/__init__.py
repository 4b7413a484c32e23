"""Checkpoints: atomic, checksummed, and named by tiers, which are links to the same bytes. Never reads a pickle."""

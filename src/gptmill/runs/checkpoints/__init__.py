"""Checkpoints: complete, checksummed, in tiers that are links to the same bytes. No pickle is ever read."""

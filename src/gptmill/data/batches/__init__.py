"""Opened shards to batches: which window comes when, as pure functions, and getting it to the device in time."""

"""Text to tokens to shards to batches. Knows no model and no ranks."""

"""Inference with a checkpoint: loading, generation with a KV cache, scoring."""

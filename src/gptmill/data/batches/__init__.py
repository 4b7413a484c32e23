"""Batches from opened shards: stateless samplers, row readers and the prefetching data loader."""

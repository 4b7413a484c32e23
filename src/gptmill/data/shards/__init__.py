"""Token shards: what a folder of them holds, and opening it: prepared here, by another project, or far away."""

"""Token shards: the manifest of a prepared corpus, and opening local, external and remote shards."""

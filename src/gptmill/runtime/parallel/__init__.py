"""How several ranks share a model: replicated or sharded. Knows no particular model."""

"""Published layouts: a model's config and weights as `transformers`, vLLM and llama.cpp know them, and back."""

"""Conversion to and from Hugging Face: config.json and weights as `transformers`, vLLM and llama.cpp read them."""

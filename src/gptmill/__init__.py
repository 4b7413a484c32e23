"""gptmill: text in, trained GPT out."""

__version__ = "0.1.0"

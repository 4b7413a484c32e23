"""Configuration: frozen dataclasses, recipes and validation. Never imports torch."""

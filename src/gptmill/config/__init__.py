"""What a run is: frozen dataclasses, recipes, validation. Never imports torch."""

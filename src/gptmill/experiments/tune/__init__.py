"""gptmill tune: the search for the fastest settings by short trials."""

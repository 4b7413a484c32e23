"""The best model that a machine can train on a corpus in a given time."""

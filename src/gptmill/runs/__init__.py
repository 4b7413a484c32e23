"""All that a run writes and reads back. Knows no loop."""

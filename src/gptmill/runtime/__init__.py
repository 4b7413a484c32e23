"""The machine: ranks, devices, precision, seeds, signals. Knows no model and no data."""

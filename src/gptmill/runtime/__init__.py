"""The machine: ranks, devices, precision, seeds, signals, hang detection. Knows no model and no data."""

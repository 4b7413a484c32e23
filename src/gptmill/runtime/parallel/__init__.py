"""Parallelism over ranks: models split or copied over the axes of a device mesh."""

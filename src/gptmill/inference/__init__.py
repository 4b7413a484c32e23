"""A checkpoint, used: loading and generating."""

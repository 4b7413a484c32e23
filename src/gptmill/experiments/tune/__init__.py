"""The search for the fastest settings: which to try next, how long a trial is, and what it shows."""

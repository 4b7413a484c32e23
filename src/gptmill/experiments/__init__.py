"""Runs as child processes: tune, bench and resume check, and the supervisor that restarts a crashed run."""

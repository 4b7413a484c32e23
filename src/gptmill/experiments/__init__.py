"""Many short runs, each a process of its own: tune, bench, resume checks, and the supervisor that restarts a run."""

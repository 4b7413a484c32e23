"""The training loop and its parts: step, state, plan, checkpointing, metrics, spike recovery, optimizers, schedules."""

"""A training loop: checkpoints, resume, metrics, preemption."""

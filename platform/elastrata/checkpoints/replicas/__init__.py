"""In-memory checkpoints: a run's state in the memory of processes other than its workers."""

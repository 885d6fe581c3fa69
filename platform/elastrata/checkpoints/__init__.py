"""Durable and in-memory checkpoints of a run: writing, committing and reading them."""

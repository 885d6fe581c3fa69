"""Text to shards to batches. Knows Ray Data and pyarrow, never torch."""

from elastrata_pipelines.errors import UserError

__all__ = ["UserError"]

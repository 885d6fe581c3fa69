"""The state of a run on storage: commits, how they are written and read."""

"""The driver: from a command to the end of a run."""

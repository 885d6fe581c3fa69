"""Measurements of `elastrata bench`: the engine's own parts, one at a time."""

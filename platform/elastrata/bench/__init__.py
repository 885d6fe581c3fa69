"""Measurements of `elastrata bench`: parts of the engine, one at a time."""

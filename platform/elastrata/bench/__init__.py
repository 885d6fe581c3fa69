"""What `elastrata bench` measures: the engine's own parts, one at a time."""

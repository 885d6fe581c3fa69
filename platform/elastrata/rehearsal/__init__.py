"""Rehearsals of runs without their GPUs: the engine's own step, on fake tensors, as one of any
number of ranks."""

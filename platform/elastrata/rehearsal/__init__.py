"""Rehearsals: the engine's own step on fake tensors, as one of any number of ranks, without
GPUs."""

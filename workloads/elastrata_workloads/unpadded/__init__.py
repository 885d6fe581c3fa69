"""Shared parts of models that run on concatenated samples, without padding."""

"""The optimizers, each in a file with its keys."""

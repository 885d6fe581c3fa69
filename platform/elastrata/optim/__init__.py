"""The optimizers, each in a file with its recipe keys."""

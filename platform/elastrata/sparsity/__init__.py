"""Sparsity: weights that are held at zero during training, on any number of ranks."""

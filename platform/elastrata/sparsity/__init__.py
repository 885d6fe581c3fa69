"""Sparsity: weights that are held at zero while a model trains, on however many ranks."""

"""Sweeps: many short runs of one recipe with other values, to find the best of them."""

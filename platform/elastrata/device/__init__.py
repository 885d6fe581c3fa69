"""A device's capabilities, its kernels, and transfers to and from it."""

"""The group of workers on Ray Train: what it does, what is asked of it, how it is replaced."""

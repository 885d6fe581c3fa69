"""Trainers to compare with, a file each: the same samples, model and optimizer.

Each file has `VARIANTS`, functions by name that train on a `Task` to its end and tell its `Meter`
about every step.
"""

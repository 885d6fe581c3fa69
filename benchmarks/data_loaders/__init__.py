"""Loaders of one corpus, a file each.

Every file has `VARIANTS`: by name, a function from the folder of the loader's own format to its
epochs, each an iterator of shuffled batches. Those with a format of their own have `write`. What a
variant needs around it, and a training run has anyway, is in `SESSIONS`.
"""

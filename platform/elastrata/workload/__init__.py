"""The seam between the engine and a model family, and the files of its weights."""

"""The interface between the engine and a model family, and the files of model weights."""

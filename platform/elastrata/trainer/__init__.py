"""A run on the worker: from a recipe, rows and a state to a trained model. Knows no Ray."""

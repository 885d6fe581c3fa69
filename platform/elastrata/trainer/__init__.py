"""Training on one worker: from a recipe, rows and a state to a trained model, without Ray."""

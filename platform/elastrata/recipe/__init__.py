"""What to train: recipes, from YAML to checked values."""

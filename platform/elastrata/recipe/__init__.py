"""Recipes, from YAML to checked values."""

"""Recipes: parsing from YAML, and validation."""

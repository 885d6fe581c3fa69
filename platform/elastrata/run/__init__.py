"""A run on storage: its folder, its owner, its history, and what they tell."""

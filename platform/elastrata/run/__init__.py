"""What there is of a run: its folder, its owner, its history, and what they tell."""

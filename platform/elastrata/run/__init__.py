"""A run on storage: its folder, owner and history, and what can be derived from them."""

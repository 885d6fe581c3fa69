"""What a trained language model makes of text."""

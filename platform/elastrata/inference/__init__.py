"""Inference: text continued by a trained language model, its perplexity, and evaluation."""

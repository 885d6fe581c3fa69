"""Inference with trained language models: text generation, perplexity and evaluation."""

"""GPT: decoders with next-token pre-training, in the styles of GPT-2 and Llama."""

from elastrata_workloads.gpt.workload import Gpt, from_transformers

__all__ = ["Gpt", "from_transformers"]

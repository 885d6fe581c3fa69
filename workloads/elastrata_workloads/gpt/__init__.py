"""GPT: next-token pre-training of a decoder, in the styles of GPT-2 and Llama."""

from elastrata_workloads.gpt.workload import Gpt

__all__ = ["Gpt"]

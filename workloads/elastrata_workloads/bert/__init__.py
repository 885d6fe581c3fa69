"""BERT: masked-language-model pre-training, with optional next-sentence prediction."""

from elastrata_workloads.bert.workload import Bert

__all__ = ["Bert"]

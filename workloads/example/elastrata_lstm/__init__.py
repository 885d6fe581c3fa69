"""A language model of LSTMs, as a workload for Elastrata."""

from elastrata_lstm.workload import Lstm

__all__ = ["Lstm"]

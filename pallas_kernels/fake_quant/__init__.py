"""Fake quantisation of training, plain or guided by a rollout's packed record, in one pass."""

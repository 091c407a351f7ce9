"""Rows made of sub-vectors from one pool, after slim embeddings (Li et al., 2018)."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("slim", "slim, shared sub-vectors")

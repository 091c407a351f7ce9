"""Frequent rows whole, a low rank for the rest, 4 bits a coefficient."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("frequent", "frequent rows whole, the rest by SVD")

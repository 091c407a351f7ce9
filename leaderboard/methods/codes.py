"""Sums of entries of codebooks, learned (Shu & Nakayama, 2018)."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("codes", "compositional codes")

"""A narrow table that a fitted DeFINE unit widens."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("define", "narrow table and DeFINE unit")

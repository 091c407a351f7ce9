"""GroupReduce (Chen et al., 2018): blocks of rows by frequency, each of a low rank."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("group-reduce", "GroupReduce")

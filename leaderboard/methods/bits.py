"""What `torchdefine adapt` makes: rotated, 0 to 8 bits a number by importance, trellis-coded."""

from leaderboard.methods._ours import of_ours

METHOD = of_ours("bits", "bits by importance")

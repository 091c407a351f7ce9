"""The default widths of a unit."""

from __future__ import annotations

from torchdefine.embedding.plan import LARGEST_DEFAULT_GROUPS, UnitConfig

TIMES_THE_WIDTH = 4
"""The paper's smallest model: vectors 256 wide, k = 1024. Its larger ones keep that k."""
WIDEST = 1024
WIDEST_MAP = 128
"""The paper's n for vectors 512 wide. A map that is not much narrower than the vectors saves nothing."""
_MULTIPLE = 2 * LARGEST_DEFAULT_GROUPS  # half of it, as in residual layers, still divides into equal groups


def map_dim_for(embedding_dim: int) -> int:
    """A quarter of a table's width, at most 128; a multiple of 16."""
    quarter = -(-embedding_dim // (4 * LARGEST_DEFAULT_GROUPS)) * LARGEST_DEFAULT_GROUPS
    return min(quarter, WIDEST_MAP)


def expand_dim_for(map_dim: int, embedding_dim: int, config: UnitConfig) -> int:
    """The paper's k for a table: four times its width, at most 1024, at least ``map_dim``; a multiple of 32.

    A unit that does not reduce gives vectors as wide as its last layer, so there the table's width decides.
    """
    if not isinstance(map_dim, int):  # before it is used; other sizes are checked by make_plan
        raise TypeError(f"map_dim must be a whole number, not {map_dim!r}.")
    if not config.reduce:
        return 2 * embedding_dim if config.skip == "residual" else embedding_dim
    wanted = min(TIMES_THE_WIDTH * embedding_dim, WIDEST) // _MULTIPLE * _MULTIPLE
    smallest = -(-map_dim // _MULTIPLE) * _MULTIPLE
    return max(wanted, smallest)

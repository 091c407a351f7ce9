"""What the ways of packing a table are called, with a sentence each: a page of help must not wait for torch."""

from __future__ import annotations

SUMMARIES = {
    "bits": "rotated, then 0 to 8 bits a number by importance; loses least in most tables",
    "svd": "a low rank",
    "frequent": "frequent rows whole, a low rank for the rest",
    "int": "as many bits a number as fit, a step for each row or each 32 numbers",
    "int8": "8 bits a number, a step for each 32",
    "int4": "4 bits a number, a step for each 32",
    "define": "a narrow table through a DeFINE unit, fitted",
    "mlp": "a narrow table through an MLP, fitted",
    "codes": "one of K entries from each of M codebooks, summed; learnt (Shu & Nakayama, 2018)",
}
"""The methods that come with the package; ``tables.METHODS`` has those that were added too."""

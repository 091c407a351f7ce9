"""Vectors of all tokens in few bytes: ways of packing them, the files they are kept in, and caches of them."""

from torchdefine.packing import METHODS, Entry
from torchdefine.tables.bits import transform_table
from torchdefine.tables.budget import Budget
from torchdefine.tables.codes import CodeLearning, coded_table
from torchdefine.tables.compact_table import CompactTable, load_table
from torchdefine.tables.fitted_unit import UnitFitting, unit_table
from torchdefine.tables.group_reduce import group_reduce_table
from torchdefine.tables.low_rank import svd_table
from torchdefine.tables.methods import Compressed, compress_embedding, table_method
from torchdefine.tables.quantised import dense_table, quantised_table
from torchdefine.tables.rows import DenseRows, Rows
from torchdefine.tables.slim import slim_table
from torchdefine.tables.source import Candidate, Method, Source
from torchdefine.tables.used import used_table

__all__ = [
    "METHODS",
    "Budget",
    "Candidate",
    "CodeLearning",
    "CompactTable",
    "Compressed",
    "DenseRows",
    "Entry",
    "Method",
    "Rows",
    "Source",
    "UnitFitting",
    "coded_table",
    "compress_embedding",
    "dense_table",
    "group_reduce_table",
    "load_table",
    "quantised_table",
    "slim_table",
    "svd_table",
    "table_method",
    "transform_table",
    "unit_table",
    "used_table",
]

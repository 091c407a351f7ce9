"""Finished tables in few bytes."""

from torchdefine.inference.banded import BandedRows
from torchdefine.inference.code_learning import CodeLearning
from torchdefine.inference.codes import CodedRows
from torchdefine.inference.compact_table import CompactTable, load_table
from torchdefine.inference.compress import Compressed, Compression, compress_embedding
from torchdefine.inference.factorised import FactorisedRows, UnitRows
from torchdefine.inference.mixed_bits import MixedBitRows
from torchdefine.inference.quantised import QuantisedRows
from torchdefine.inference.rows import DenseRows, Rows
from torchdefine.inference.tables import (
    coded_table,
    dense_table,
    frequent_rows_table,
    product_quantised_table,
    quantised_table,
    svd_table,
    tensor_train_table,
)
from torchdefine.inference.tensor_train import TensorTrainRows
from torchdefine.inference.transform import transform_table

__all__ = [
    "BandedRows",
    "CodeLearning",
    "CodedRows",
    "CompactTable",
    "Compressed",
    "Compression",
    "DenseRows",
    "FactorisedRows",
    "MixedBitRows",
    "QuantisedRows",
    "Rows",
    "TensorTrainRows",
    "UnitRows",
    "coded_table",
    "compress_embedding",
    "dense_table",
    "frequent_rows_table",
    "load_table",
    "product_quantised_table",
    "quantised_table",
    "svd_table",
    "tensor_train_table",
    "transform_table",
]

"""The ``weight`` of a replaced table: a matrix that is computed where it is read, and cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchdefine.errors import UserError

_FACTS = {"__get__", "__len__", "__repr__", "data_ptr", "dim", "element_size", "is_floating_point", "nelement", "numel"}
_FACTS |= {"size", "stride", "untyped_storage"}
_LATER = {"data", "detach"}
"""They give the matrix itself, which needs no values yet."""


class Matrix(Tensor):
    """A matrix that is not stored. Whatever is computed with it reads its values; whatever would change it is refused.

    A view of it is another one. So code that reads ``embedding.weight`` works, and nothing that is written is lost.
    """

    _values: Callable[[], Tensor]
    _is_hf_initialized = True  # transformers draws no values for it

    @staticmethod
    def of(size: tuple[int, ...], like: Tensor, values: Callable[[], Tensor]) -> Matrix:
        facts: Any = {"dtype": like.dtype, "device": like.device}
        matrix: Matrix = Tensor._make_wrapper_subclass(Matrix, size, **facts)
        matrix._values = values
        return matrix

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Matrix({tuple(self.shape)}, {self.dtype}, computed by torchdefine)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = func.__name__, args[0] if args else kwargs.get("tensor")  # as torch.nn.init passes it
        own = first if isinstance(first, Matrix) else None
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)
            name = "__get__" if name not in (*_LATER, "T", "mT", "H", "mH") else name
        if own is not None and (name in ("__set__", "__setitem__") or (name[-1] == "_" and name[-2] != "_")):
            raise UserError(
                "The matrix of a table that torchdefine replaced cannot be written, frozen or merged into: use the "
                "module's own parameters(), or restore the table first."
            )
        if own is not None and name in _LATER:
            return Matrix.of(tuple(own.shape), own, lambda: own._values().detach())
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        read: list[Tensor] = []

        def values(matrix: Matrix) -> Tensor:
            read.append(matrix._values())
            return read[-1]

        def unwritten(result: Tensor) -> Tensor:
            shared = any(result.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in read)
            return Matrix.of(tuple(result.shape), result, lambda: result) if shared else result

        args, kwargs = tree_map_only(Matrix, values, (args, kwargs))
        return tree_map_only(Tensor, unwritten, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UserError(f"The matrix of a table that torchdefine replaced cannot be used in {func}: restore it first.")

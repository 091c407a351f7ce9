"""Cross-entropy over a vocabulary without all the logits: a linear layer and its loss in one pass over the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from torchdefine.embedding.map import check_ids, widened_ids
from torchdefine.errors import UserError, check_count
from torchdefine.ops import add_column_sums, add_onto, autocast_dtype, exact_dtype, softmax_loss
from torchdefine.ops.softmax_loss import Classes

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)  # computed here: older versions of torch.compile cannot trace get_args

LOGITS_AT_ONCE = 2**24  # 64 MiB in float32
ALIGNED_COLUMNS, ALIGNED_FEATURES = 16, 8  # on a GPU: its products and our kernels are slower with other numbers
HAS_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # from torch 2.8 on
FEWEST_TOKENS_AT_ONCE = 256  # each chunk reads all of the weight and adds to all of its gradient: fewer would not pay


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    tokens_at_once: int | None = None,
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, targets, …)`` in the memory of ``tokens_at_once`` rows of logits.

    The gradients are worked out beside the loss, so "mean" and "sum" compute the logits once; "none" computes them
    again in backward. Products run in the dtype of the inputs, or of autocast; everything else, the loss and the sums
    for ``weight`` and ``bias`` included, in float32 (float64 for float64). Gradients of gradients are refused.

    Args:
        hidden: (T, d).
        weight: (V, d).
        targets: (T,) ids; those equal to ``ignore_index`` do not count.
        bias: (V,).
        tokens_at_once: by default as many as make 64 MiB of logits, but no fewer than 256.
    """
    check_loss_options(reduction, label_smoothing)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (T, d) and (V, d).")
    if targets.shape != hidden.shape[:1]:
        problem = f"targets {tuple(targets.shape)} need one id for each of the {hidden.shape[0]} rows of hidden"
        raise UserError(f"{problem}: flatten both in the same way.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"bias {tuple(bias.shape)} needs one number for each of {weight.shape[0]} rows: resize it.")
    if tokens_at_once is not None:
        check_count("tokens_at_once", tokens_at_once, "leave it out for the default")
    ids, counted = checked_targets(targets, ignore_index, weight.shape[0])
    checked = Targets(ids, counted, label_smoothing, reduction == "none")
    losses = table_losses(hidden, Table(weight, bias), checked, tokens_at_once)
    return mean_over(losses, counted) if reduction == "mean" else losses


def check_loss_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in REDUCTIONS:
        raise UserError(f"The reduction {reduction!r} is unknown: use mean, sum or none.")
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing is {label_smoothing}, but must be between 0 and 1: try 0.1.")


def checked_targets(targets: Tensor, ignore_index: int, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """The ids (T,), 0 where a token does not count, and whether it does."""
    targets = widened_ids(targets)
    counted = targets != ignore_index
    ids = torch.where(counted, targets, 0)
    check_ids(ids, num_embeddings)
    return ids.long(), counted


def mean_over(total: Tensor, counted: Tensor) -> Tensor:
    """The mean loss of the counted tokens; nan with zero gradients if there are none, as in torch."""
    count = counted.sum()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def fitting_tokens(num_embeddings: int) -> int:
    """How many tokens to take at once, so that memory does not grow with their number."""
    return max(FEWEST_TOKENS_AT_ONCE, LOGITS_AT_ONCE // num_embeddings)


class Table(NamedTuple):
    """The rows that hidden vectors are compared with, (V, d), and their biases, (V,)."""

    weight: Tensor
    bias: Tensor | None = None


class Targets(NamedTuple):
    """What vectors are held against, checked."""

    ids: Tensor
    """(T,): 0 where a token does not count."""
    counted: Tensor
    """(T,)"""
    label_smoothing: float
    per_token: bool
    """Whether the loss of each token is asked for, rather than their sum."""
    hint: Sequence[int] | None = None
    """The output layer's ``host_hint``."""


def table_losses(hidden: Tensor, table: Table, targets: Targets, tokens_at_once: int | None = None) -> Tensor:
    """`linear_cross_entropy` of what was checked: losses (T,) or their sum."""
    dtype = autocast_dtype(hidden)
    if dtype is None and hidden.dtype != table.weight.dtype:
        raise UserError(f"hidden is {hidden.dtype} and weight {table.weight.dtype}: convert one, or use autocast.")
    at_once = tokens_at_once or fitting_tokens(len(table.weight))
    task: Task = (*targets[:3], at_once, dtype or hidden.dtype)
    if targets.per_token or not torch.is_grad_enabled():
        losses: Tensor = _Losses.apply(hidden, *table, False, *task)
        return losses if targets.per_token else losses.sum()
    return _Losses.apply(hidden, *table, True, *task)


Task = tuple[Tensor, Tensor, float, int, torch.dtype]
"""What a pass over the tokens needs beside the three inputs that may need a gradient: the targets' columns (T,) and
which tokens count, (T,), label smoothing, tokens at once, and the dtype of products."""


class _Losses(torch.autograd.Function):
    """The losses of all tokens or their sum.

    Gradients of the sum are worked out beside it and only scaled in backward, where float16 would lose small ones if
    they had been divided by the number of tokens. The losses of single tokens may get different gradients, so that
    backward makes the pass again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, summed: bool, *task: Any) -> Tensor:
        (columns, counted), ctx.options = task[:2], task[2:]
        wanted = ctx.needs_input_grad[:3] if summed else (False, False, False)
        incoming = torch.ones_like(columns, dtype=ctx.options[-1]) if any(wanted) else None
        losses, gradients = _through_chunks(hidden, Table(weight, bias), task, incoming, wanted)
        ctx.save_for_backward(*(gradients if summed else (hidden, weight, bias, columns, counted)))
        ctx.summed, ctx.dtypes = summed, [None if given is None else given.dtype for given in (hidden, weight, bias)]
        return losses.sum() if summed else losses

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable would not notice a gradient penalty, since gradients may be computed in advance
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("linear_cross_entropy has no second derivatives: use F.cross_entropy for them.")
        if ctx.summed:
            gradients = [None if gradient is None else gradient * incoming for gradient in ctx.saved_tensors]
        else:
            hidden, weight, bias, *targets = ctx.saved_tensors
            task, wanted = (*targets, *ctx.options), ctx.needs_input_grad[:3]
            _, gradients = _through_chunks(hidden, Table(weight, bias), task, incoming, wanted)
        cast = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (*cast, *(None,) * 6)


def _through_chunks(
    hidden: Tensor, table: Table, task: Task, incoming: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses (T,) and the wanted gradients of Σ incoming · losses; those of weight and bias in full precision."""
    (target_columns, counted, label_smoothing, tokens_at_once, dtype), (weight, bias) = task, table
    exact = exact_dtype(hidden)
    (classes, width), (columns, features) = weight.shape, _aligned_shape(weight)  # (V, d) and (P, f)
    losses = torch.empty_like(target_columns, dtype=exact)  # (T,)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None  # (T, d)
    grad_weight = weight.new_empty(columns, features, dtype=exact) if wanted[1] else None  # (P, f)
    grad_bias = bias.new_zeros(columns, dtype=exact) if bias is not None and wanted[2] else None  # (P,)
    with torch.autocast(hidden.device.type, enabled=False):  # the dtype of the products is already chosen
        matrix = _filled_up(weight, columns, features, dtype)  # (P, f)
        added = None if bias is None else F.pad(bias, (0, columns - classes)).contiguous()  # (P,)
        for start in range(0, hidden.shape[0], tokens_at_once):
            chunk = slice(start, start + tokens_at_once)
            rows = _filled_up(hidden[chunk], None, features, dtype)  # (t, f)
            logits = rows @ matrix.T  # (t, P)
            held_against = Classes(target_columns[chunk], counted[chunk], classes, added, label_smoothing)
            losses[chunk], gradient = softmax_loss(logits, held_against, with_gradient=incoming is not None)
            if incoming is None or gradient is None:
                continue
            weights = torch.where(held_against.counted, incoming[chunk], 0)  # (t,)
            if grad_bias is not None:
                add_column_sums(grad_bias, gradient, weights)
            seen = weights.is_cpu and not torch.compiler.is_compiling()  # a CPU can see that all are one
            factor = None if seen and bool((weights == 1).all()) else weights.unsqueeze(1)  # for (t, f), not (t, P)
            gradient = gradient.to(dtype)  # (t, P), still without incoming
            if grad_hidden is not None:
                _fill_product(grad_hidden[chunk], gradient, matrix, factor)
            if grad_weight is not None:
                weighted = rows if factor is None else (rows * factor).to(rows.dtype)
                _add_product(grad_weight, gradient.T, weighted, first=start == 0)
    if grad_weight is not None and not len(hidden):
        grad_weight.zero_()
    grad_weight = None if grad_weight is None else grad_weight[:classes, :width]
    return losses, [grad_hidden, grad_weight, None if grad_bias is None else grad_bias[:classes]]


def _aligned_shape(weight: Tensor) -> tuple[int, int]:
    """The shape to which a weight is filled up, so that a GPU multiplies it fast. A CPU needs no filling."""
    classes, width = weight.shape
    return aligned_shape(classes, width) if weight.is_cuda else (classes, width)


def aligned_shape(classes: int, width: int) -> tuple[int, int]:
    return -(-classes // ALIGNED_COLUMNS) * ALIGNED_COLUMNS, -(-width // ALIGNED_FEATURES) * ALIGNED_FEATURES


def _filled_up(values: Tensor, rows: int | None, features: int, dtype: torch.dtype) -> Tensor:
    """Values converted and filled up with zeros in one go; not copied if dtype and shape are right already."""
    rows = values.shape[0] if rows is None else rows
    if values.shape == (rows, features):
        return values.to(dtype)
    filled = values.new_empty(rows, features, dtype=dtype)
    filled[: values.shape[0], : values.shape[1]] = values
    filled[values.shape[0] :] = 0
    filled[: values.shape[0], values.shape[1] :] = 0
    return filled


def _fill_product(total: Tensor, left: Tensor, right: Tensor, factor: Tensor | None) -> None:
    """Fill ``total`` with the rows of a product, each times its factor; extra columns are left out."""
    if factor is None and total.dtype == left.dtype and total.shape[1] == right.shape[1]:
        torch.mm(left, right, out=total)
    else:
        product = left @ right
        total.copy_((product if factor is None else product * factor)[:, : total.shape[1]])


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add to the products before; the first fills memory that holds nothing yet."""
    if left.dtype != total.dtype:
        if left.dtype != torch.float16:
            product = left @ right
        elif left.is_cuda and HAS_WIDE_PRODUCTS:  # sums over many tokens may be too large for float16
            product = torch.mm(left, right, out_dtype=torch.float32)
        else:
            product = left.float() @ right.float()
        total.copy_(product) if first else add_onto(total, product)
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)

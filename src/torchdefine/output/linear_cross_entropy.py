"""Cross-entropy over a vocabulary without all the logits: a linear layer and its loss in one pass over the tokens."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from torchdefine.embedding.map import check_ids, widened_ids
from torchdefine.errors import UserError
from torchdefine.ops import autocast_dtype, exact_dtype
from torchdefine.ops.softmax_loss import Classes, add_column_sums, add_onto, softmax_loss

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
    _check_shapes(hidden, weight, targets, bias)
    if tokens_at_once is None:
        tokens_at_once = fitting_tokens(weight.shape[0])
    elif tokens_at_once < 1:
        raise UserError(f"tokens_at_once is {tokens_at_once}, but must be at least 1: leave it out for the default.")
    targets = widened_ids(targets)
    counted = targets != ignore_index
    columns = torch.where(counted, targets, 0)
    check_ids(columns, weight.shape[0])
    task = _Task(columns.long(), counted, label_smoothing, tokens_at_once, _product_dtype(hidden, weight))
    if reduction == "none":
        return _TokenLosses.apply(hidden, weight, bias, *task)
    total: Tensor = _TotalLoss.apply(hidden, weight, bias, *task, torch.is_grad_enabled())
    return total if reduction == "sum" else mean_over(total, counted)


def mean_over(total: Tensor, counted: Tensor) -> Tensor:
    """The mean loss of the counted tokens; nan with zero gradients if there are none, as in torch."""
    count = counted.sum()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def fitting_tokens(num_embeddings: int) -> int:
    """How many tokens to take at once, so that memory does not grow with their number."""
    return max(FEWEST_TOKENS_AT_ONCE, LOGITS_AT_ONCE // num_embeddings)


def check_loss_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in REDUCTIONS:
        raise UserError(f"The reduction {reduction!r} is unknown: use mean, sum or none.")
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing is {label_smoothing}, but must lie between 0 and 1: use 0.1, say.")


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not match: pass (T, d) and (V, d)."
        )
    if targets.shape != hidden.shape[:1]:
        raise UserError(
            f"targets {tuple(targets.shape)} need one id for each of the {hidden.shape[0]} rows of hidden: "
            f"flatten both in the same way."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(
            f"bias {tuple(bias.shape)} needs one number for each of the {weight.shape[0]} rows of weight: resize it."
        )


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if (autocast := autocast_dtype(hidden)) is not None:
        return autocast
    if hidden.dtype != weight.dtype:
        raise UserError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: convert one to the other, or work under autocast."
        )
    return hidden.dtype


class _Task(NamedTuple):
    """What a pass over the tokens needs beside the three inputs that may need a gradient."""

    columns: Tensor  # (T,) of the targets; any column where the token is not counted
    counted: Tensor  # (T,)
    label_smoothing: float
    tokens_at_once: int
    product_dtype: torch.dtype


class _TotalLoss(torch.autograd.Function):
    """The sum over tokens. Gradients are of the plain sum and only scaled in backward, where float16 would lose
    small ones if they had been divided by the number of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Tensor,
        counted: Tensor,
        label_smoothing: float,
        tokens_at_once: int,
        product_dtype: torch.dtype,
        grad_enabled: bool,  # needs_input_grad does not know about no_grad
    ) -> Tensor:
        task = _Task(columns, counted, label_smoothing, tokens_at_once, product_dtype)
        wanted = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        incoming = torch.ones_like(columns, dtype=product_dtype) if any(wanted) else None
        losses, gradients = _through_chunks(hidden, weight, bias, task, incoming, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if given is None else given.dtype for given in (hidden, weight, bias)]
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        scaled = [
            None if gradient is None else (gradient * incoming).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None, None)


def _refuse_second_derivatives() -> None:
    """once_differentiable would not notice a gradient penalty, since the first gradient is computed in advance."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "linear_cross_entropy has no second derivatives: leave create_graph out, or use F.cross_entropy."
        )


class _TokenLosses(torch.autograd.Function):
    """The loss of every token; each may get a different gradient, so backward makes the pass again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Tensor,
        counted: Tensor,
        label_smoothing: float,
        tokens_at_once: int,
        product_dtype: torch.dtype,
    ) -> Tensor:
        task = _Task(columns, counted, label_smoothing, tokens_at_once, product_dtype)
        losses, _ = _through_chunks(hidden, weight, bias, task, None, (False, False, False))
        ctx.save_for_backward(hidden, weight, bias, columns, counted)
        ctx.options = (label_smoothing, tokens_at_once, product_dtype)
        return losses

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, weight, bias, columns, counted = ctx.saved_tensors
        task = _Task(columns, counted, *ctx.options)
        _, gradients = _through_chunks(hidden, weight, bias, task, incoming, ctx.needs_input_grad[:3])
        given = (hidden, weight, bias)
        cast = [None if g is None else g.to(of.dtype) for g, of in zip(gradients, given, strict=True)]
        return (*cast, None, None, None, None, None)


def _through_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    task: _Task,
    incoming: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The losses (T,) and the wanted gradients of Σ incoming · losses; those of weight and bias in full precision."""
    exact = exact_dtype(hidden)
    (classes, width), (columns, features) = weight.shape, _aligned_shape(weight)  # (V, d) and (P, f)
    losses = torch.empty_like(task.columns, dtype=exact)  # (T,)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None  # (T, d)
    grad_weight = weight.new_empty(columns, features, dtype=exact) if wanted[1] else None  # (P, f)
    grad_bias = bias.new_zeros(columns, dtype=exact) if bias is not None and wanted[2] else None  # (P,)
    with torch.autocast(hidden.device.type, enabled=False):  # the dtype of the products is already chosen
        matrix = _filled_up(weight, columns, features, task.product_dtype)  # (P, f)
        added = None if bias is None else F.pad(bias, (0, columns - classes)).contiguous()  # (P,)
        for start in range(0, hidden.shape[0], task.tokens_at_once):
            chunk = slice(start, start + task.tokens_at_once)
            rows = _filled_up(hidden[chunk], None, features, task.product_dtype)  # (t, f)
            logits = rows @ matrix.T  # (t, P)
            held_against = Classes(task.columns[chunk], task.counted[chunk], classes, added, task.label_smoothing)
            losses[chunk], gradient = softmax_loss(logits, held_against, with_gradient=incoming is not None)
            if incoming is None or gradient is None:
                continue
            weights = torch.where(held_against.counted, incoming[chunk], 0)  # (t,)
            if grad_bias is not None:
                add_column_sums(grad_bias, gradient, weights)
            factor = _factor(weights)  # multiplied into (t, f) tensors, not into (t, P)
            gradient = gradient.to(task.product_dtype)  # (t, P), still without incoming
            if grad_hidden is not None:
                _fill_product(grad_hidden[chunk], gradient, matrix, factor)
            if grad_weight is not None:
                weighted = rows if factor is None else (rows * factor).to(rows.dtype)
                _add_product(grad_weight, gradient.T, weighted, first=start == 0)
    if grad_weight is not None and not len(hidden):
        grad_weight.zero_()
    return losses, (
        grad_hidden,
        None if grad_weight is None else grad_weight[:classes, :width],
        None if grad_bias is None else grad_bias[:classes],
    )


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


def _factor(weights: Tensor) -> Tensor | None:
    """Weights of rows as a factor, (t, 1); None where a CPU sees that all are one."""
    if weights.device.type == "cpu" and not torch.compiler.is_compiling() and bool((weights == 1).all()):
        return None
    return weights.unsqueeze(1)


def _fill_product(total: Tensor, left: Tensor, right: Tensor, factor: Tensor | None) -> None:
    """Fill ``total`` with the rows of a product, each times its factor; extra columns are left out."""
    if factor is None and total.dtype == left.dtype and total.shape[1] == right.shape[1]:
        torch.mm(left, right, out=total)
    else:
        product = left @ right
        total.copy_((product if factor is None else product * factor)[:, : total.shape[1]])


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A float32 product of float16 matrices: sums over many tokens may be too large for float16."""
    if left.is_cuda and HAS_WIDE_PRODUCTS:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add to the products before; the first fills memory that holds nothing yet."""
    if left.dtype != total.dtype:
        product = _wide_product(left, right) if left.dtype == torch.float16 else left @ right
        total.copy_(product) if first else add_onto(total, product)
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)

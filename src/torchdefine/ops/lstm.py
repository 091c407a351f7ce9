"""One LSTM layer over a segment, by the fastest way that its inputs allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchdefine.ops.cudnn_lstm import cudnn_lstm
from torchdefine.ops.persistent_lstm import has_kernel, persistent_lstm


def lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    impl: Literal["auto", "kernel", "cudnn", "torch"] = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, B, input) and the state h, c (1, B, output) → all outputs, and the state after the last position.

    ``weights`` are weight_ih, weight_hh, bias_ih and bias_hh; they may be made anew for every call, such as dropped
    ones. "auto" takes our persistent kernel where one fits, else cuDNN on a GPU, else torch's own.
    """
    if impl == "auto":
        on_gpu = x.is_cuda and torch.backends.cudnn.is_acceptable(x)
        impl = "kernel" if has_kernel(x, h.shape[-1]) else "cudnn" if on_gpu else "torch"
    if impl == "kernel":
        return persistent_lstm(x, h, c, weights)
    if impl == "cudnn":
        return cudnn_lstm(x, h, c, weights)
    found: Any = torch._VF.lstm(x, (h, c), list(weights), True, 1, 0.0, True, False, False)
    y, after_h, after_c = found
    return y, after_h, after_c

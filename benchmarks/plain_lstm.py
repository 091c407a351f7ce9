"""LSTM language models of stock modules: the paper's, and AWD-LSTM as a plain loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

States = list[tuple[Tensor, Tensor]]


class PlainLSTM(nn.Module):
    """(B, T, input) → (B, T, output): one nn.LSTM for the layers of equal width, one for the last, which is narrower.

    Dropout is nn.LSTM's own between the layers, and nn.Dropout elsewhere.
    """

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.wide = nn.LSTM(input_dim, hidden_dim, layers - 1, batch_first=True, dropout=dropout if layers > 2 else 0.0)
        self.last = nn.LSTM(hidden_dim, output_dim, batch_first=True)

    def forward(self, x: Tensor, state: States | None) -> tuple[Tensor, States]:
        wide, last = state or (None, None)
        hidden, after_wide = self.wide(F.dropout(x, self.dropout, self.training), wide)
        hidden, after_last = self.last(F.dropout(hidden, self.dropout, self.training), last)
        after = [(h.detach().float(), c.detach().float()) for h, c in (after_wide, after_last)]
        return F.dropout(hidden, self.dropout, self.training), after


class PlainAWDLSTM(nn.Module):
    """What one writes without further thought: stock layers, masks by hand, all logits at once."""

    def __init__(self, vocabulary: int, width: int, hidden_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        widths = ((width, hidden_dim), (hidden_dim, hidden_dim), (hidden_dim, width))
        self.layers = nn.ModuleList(nn.LSTM(*pair) for pair in widths)
        whole = [layer._parameters.pop("weight_hh_l0") for layer in self.layers]
        self.raw = nn.ParameterList(whole)  # what the layers use is drawn from it, dropped, in every step
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, targets: Tensor, state: States | None) -> tuple[Tensor, States]:
        """(T, B) ids and targets → the loss with its penalties."""
        rows = self.embedding.weight.new_empty(self.embedding.num_embeddings, 1).bernoulli_(0.9) / 0.9
        x = _locked(F.embedding(ids, self.embedding.weight * rows), 0.4)  # (T, B, width)
        after: States = []
        for index, (layer, raw) in enumerate(zip(self.layers, self.raw, strict=True)):
            layer.weight_hh_l0 = F.dropout(raw, 0.5)
            x, (h, c) = layer(x, None if state is None else state[index])
            after.append((h.detach().float(), c.detach().float()))
            if index < 2:
                x = _locked(x, 0.25)
        dropped = _locked(x, 0.4)
        logits = F.linear(dropped, self.embedding.weight, self.bias).flatten(0, 1).float()  # (T · B, V)
        loss = F.cross_entropy(logits, targets.flatten())
        return loss + 2 * dropped.float().square().mean() + x.float().diff(dim=0).square().mean(), after


def _locked(x: Tensor, p: float) -> Tensor:
    return x * (x.new_empty(1, *x.shape[1:]).bernoulli_(1 - p) / (1 - p))

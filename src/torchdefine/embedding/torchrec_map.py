"""A map whose table is TorchRec's, which splits it over GPUs and updates its rows within backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding.map import as_ids, check_table
from torchdefine.errors import UserError

TABLE = "table"


class TorchRecMap(nn.Module):
    """One table of V × n in an ``EmbeddingCollection`` of TorchRec: for ``DeFINE.over`` on several GPUs.

    ``torchrec.distributed.DistributedModelParallel`` puts its sharded collection in the place of ``collection``. Build
    the map on the meta device then, so that no process has the whole table.
    """

    padding_idx = None

    def __init__(self, num_embeddings: int, map_dim: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_table(num_embeddings, map_dim, None)
        self.num_embeddings, self.map_dim, self.output_dim, self.std = num_embeddings, map_dim, map_dim, map_dim**-0.5
        try:
            from torchrec.modules.embedding_configs import EmbeddingConfig
            from torchrec.modules.embedding_modules import EmbeddingCollection
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except (ImportError, OSError) as error:  # it loads its kernels as it is imported
            reason = str(error).splitlines()[0]
            raise UserError(
                f"TorchRec does not load here ({reason}): install torchrec and the fbgemm-gpu of your torch, or use a "
                "StandardMap."
            ) from None
        config = EmbeddingConfig(
            name=TABLE, num_embeddings=num_embeddings, embedding_dim=map_dim, feature_names=[TABLE], init_fn=self._draw
        )
        self.collection: Any = EmbeddingCollection(tables=[config], device=torch.device(device or "cpu"))
        self._jagged: Any = KeyedJaggedTensor

    def _draw(self, weight: Tensor) -> None:
        """A shard calls this too."""
        nn.init.normal_(weight, std=self.std)

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        flat = as_ids(ids, self.num_embeddings).reshape(-1)
        features = self._jagged(keys=[TABLE], values=flat, lengths=torch.ones_like(flat))
        vectors: Tensor = self.collection(features)[TABLE].values()
        return vectors.view(*ids.shape, self.map_dim)  # (…, n)

    def reset_parameters(self, std: float | None = None) -> None:
        self.std = self.std if std is None else std
        for weight in self.collection.parameters():
            self._draw(weight)

    def resize(self, num_embeddings: int) -> None:
        raise UserError("A table of TorchRec keeps its number of rows: build a new one.")

    def to_config(self) -> dict[str, Any]:
        raise UserError("A table of TorchRec has no files of ours: save it by torch.distributed.checkpoint.")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings:,} × {self.map_dim}"

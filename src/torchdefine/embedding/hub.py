"""Embeddings on the Hugging Face Hub and in folders, by the Hub's own mixin, which is imported when it is used."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Self

from torchdefine import __version__
from torchdefine.errors import UserError


class Hub:
    """``from_pretrained``, ``save_pretrained`` and ``push_to_hub`` as models on the Hub have them.

    Their options are those of ``huggingface_hub.ModelHubMixin``; the files are those of ``save`` and ``load``, and a
    card.
    """

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Save into a folder, and with ``push_to_hub=True`` to the Hub."""
        found: str | None = _hub_model()(self).save_pretrained(save_directory, **self._about(), **options)
        return found

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hub; returns the address of the commit."""
        found: str = _hub_model()(self).push_to_hub(repo_id, **self._about(), **options)
        return found

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Load from a folder, or by a name on the Hub."""
        found: Self = _hub_model().from_pretrained(name, kind=cls, **options).embedding
        return found

    def _about(self) -> dict[str, Any]:
        """What programs that list models read."""
        return {"config": {**self.to_config(), "torchdefine_version": __version__}}  # type: ignore[attr-defined]


@cache
def _hub_model() -> Any:
    """The class that has the mixin. It holds an embedding, so that embeddings need no package of the Hub."""
    try:
        from huggingface_hub import ModelHubMixin, snapshot_download
    except ImportError:
        raise UserError("from_pretrained and save_pretrained need more: pip install 'torchdefine[hf]'.") from None

    about: Any = {"library_name": "torchdefine", "tags": ["embedding", "DeFINE"]}

    class HubModel(ModelHubMixin, **about):
        def __init__(self, embedding: Any) -> None:
            self.embedding = embedding

        def _save_pretrained(self, save_directory: Path) -> None:
            self.embedding.save(save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, kind: Any, **hub: Any) -> HubModel:
            folder = model_id if Path(model_id).is_dir() else snapshot_download(model_id, **hub)
            return cls(kind.load(folder))

    return HubModel

"""What can be done with a trained masked language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchdefine.data import TokenFile
from torchdefine.errors import UserError
from torchdefine.export import Exportable, on_the_cpu
from torchdefine.files import Progress
from torchdefine.modes import evaluating, reading
from torchdefine.run.run import Measured, Run, Sample, text_of
from torchdefine.tasks.masked.batches import Masking
from torchdefine.tasks.masked.evaluate import Protocol, evaluate
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.programs import exportable
from torchdefine.tasks.masked.recipe import MaskedRecipe
from torchdefine.tasks.masked.text import MaskedTokenizer
from torchdefine.tasks.masked.transformers_folder import STOCK, WITH_UNIT, model_card, write_transformers
from torchdefine.training.evaluation import Evaluation

SHOWN_FILLS = 5


def protocol_of(recipe: MaskedRecipe, tokens: MaskedTokenizer) -> Protocol:
    """How a recipe evaluates."""
    return Protocol(
        Masking(recipe.masking, tokens), tokens, recipe.train.length, recipe.eval.batch_size, recipe.eval.seed
    )


class MaskedRun(Run):
    """A trained masked language model with its tokenizer, settings and result."""

    model: MaskedModel
    recipe: MaskedRecipe
    tokenization: MaskedTokenizer

    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | TokenFile | None = None,
        with_accuracy: bool = False,
        progress: Progress | None = None,
    ) -> tuple[Evaluation, float | None]:
        """The perplexity of hidden tokens of a split of the run's own text, or of another one, and their accuracy."""
        text = text_of(self, split, data)
        protocol = protocol_of(self.recipe, self.tokenization)
        return evaluate(self.model, text, protocol, with_accuracy=with_accuracy, progress=progress)

    def measure(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> Measured:
        """Masked perplexity and accuracy, in lines and as facts."""
        found, right = self.evaluate(split, data=data, with_accuracy=True, progress=progress)
        lines = [
            f"{split} masked perplexity {found.perplexity:,.4f} (loss {found.loss:.5f} nats, {right:.2%} right)",
            f"{found.tokens:,} hidden tokens",
            found.protocol,
        ]
        return Measured(lines, {**found.to_dict(), "accuracy": right})

    @torch.no_grad()
    def fill(self, text: str, most: int = SHOWN_FILLS) -> list[list[tuple[str, float]]]:
        """The likeliest tokens for every mask of a text, each with its probability."""
        tokens = self.tokenization
        pieces = text.replace("<mask>", tokens.mask).split(tokens.mask)
        if len(pieces) < 2:
            raise UserError(f"There is nothing to fill in {text!r}: write {tokens.mask} where a word is missing.")
        encoded = [tokens.encode_sentences([piece])[0] if piece else [] for piece in pieces]
        ids = [tokens.bos_id, *encoded[0]]
        for piece in encoded[1:]:
            ids += [tokens.mask_id, *piece]
        row = torch.tensor([[*ids, tokens.eos_id]], device=next(self.model.parameters()).device)
        places = (row == tokens.mask_id).nonzero()[:, 1].unsqueeze(0)  # (1, K)
        with reading(self.model) as model:
            log_probs, found = model.output.top_k(model.at(places, model.hidden(row)), most)  # (1, K, most)
        return [
            [(tokens.decode_sentence([index]), prob) for index, prob in zip(ids, probs, strict=True)]
            for ids, probs in zip(found[0].tolist(), log_probs[0].exp().tolist(), strict=True)
        ]

    def sample(self, prompt: str, length: int, seed: int) -> Sample:
        """What it takes for the words of a prompt, each hidden in turn."""
        words = prompt.split()[:length]
        rows = []
        for place, word in enumerate(words):
            hidden = " ".join([*words[:place], self.tokenization.mask, *words[place + 1 :]])
            filled = ", ".join(f"{token} {probability:.0%}" for token, probability in self.fill(hidden)[0])
            rows.append((word, filled))
        lead = f"“{prompt}”, with one word hidden at a time: the most probable subwords in its place."
        return Sample(lead, table=(("hidden", "most probable"), rows))

    def exportable(self, model: MaskedModel) -> Exportable:
        return exportable(model, self.tokenization)

    def export(
        self,
        folder: str | Path,
        format: str = "torch-export",
        *,
        license: str | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """As of any run; and "transformers" gives a stock model with its tokenizer.

        "transformers-with-unit" gives one with the small table and the unit inside, which trains on.
        """
        if format not in (STOCK, WITH_UNIT):
            return super().export(folder, format, license=license, progress=progress)
        if format == WITH_UNIT and self.model.embedding.looked_up is not None:
            raise UserError("A folder with the unit computes its vectors: leave --cached and --compressed out.")
        model = on_the_cpu(self.model)
        card = model_card(self.recipe, self.result if self.folder.result.exists() else {}, license, format)
        with evaluating(model):
            difference = write_transformers(model, self.tokenization, folder, card, format)
        return {"format": format, "programs": {}, "largest_difference": difference}

    @property
    def names_of_tokens(self) -> MaskedTokenizer:
        return self.tokenization

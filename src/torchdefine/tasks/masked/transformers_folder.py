"""A trained run as a folder of transformers.

The format ``transformers`` is a stock class with the cached table, which loads without torchdefine. The other one has
the small table and its unit inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchdefine.errors import MachineError
from torchdefine.files import make_weights_readable_as, new_folder, write_text
from torchdefine.plain import escaped
from torchdefine.task import Recipe
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.stock import package, stock_model
from torchdefine.tasks.masked.text import MaskedTokenizer

STOCK, WITH_UNIT = "transformers", "transformers-with-unit"
"""The formats of such a folder."""
TOLERANCE = 1e-5
"""The largest difference allowed between log-probabilities, relative for those above 1."""
CARD = """---
library_name: {library}
pipeline_tag: fill-mask
{licence}---

# {title}

A masked language model, trained with torchdefine. {table}

```python
{opening}from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForMaskedLM.from_pretrained("path/to/this/folder")
```

`SentenceTransformer("path/to/this/folder")` gives the mean of its vectors. It was not trained for sentences: train on.
{measured}
"""
ABOUT = {
    STOCK: {
        "library": "transformers",
        "table": "Its table holds the finished vectors of all tokens, so it needs no torchdefine.",
        "opening": "",
    },
    WITH_UNIT: {
        "library": "torchdefine",
        "table": "Its tokens have a small table and a unit behind it, which train on. It loads with torchdefine: "
        "`pip install 'torchdefine[hf]'`.",
        "opening": "import torchdefine.adapt.huggingface\n",
    },
}
"""What the card says of each format."""


def write_transformers(
    model: MaskedModel, tokens: MaskedTokenizer, folder: str | Path, card: str, format: str
) -> float:
    """Write a model in evaluation mode, on the CPU, into a new folder; returns the largest difference to it.

    ``AutoModelForMaskedLM``, ``AutoModel`` and, by the mean over tokens, ``SentenceTransformer`` load it.
    """
    made = _made(format)(model, tokens)
    difference = largest_difference(model, made)
    if not difference <= TOLERANCE:
        raise MachineError(f"The model of transformers differs by {difference:.1e}, so nothing was written.")
    width, pooling = model.encoder.width, "1_Pooling"
    kinds = ("", "sentence_transformers.models.Transformer"), (pooling, "sentence_transformers.models.Pooling")
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    with new_folder(folder) as making, _without_bars():
        made.save_pretrained(making)
        make_weights_readable_as(making / "config.json")
        fast_tokenizer(tokens, model.encoder.config.most_places).save_pretrained(making)
        (making / pooling).mkdir()
        mean = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
        write_text(making / pooling / "config.json", json.dumps(mean, indent=2) + "\n")
        write_text(making / "modules.json", json.dumps(modules, indent=2) + "\n")
        write_text(making / "README.md", card)
    return difference


def _made(format: str) -> Callable[[MaskedModel, MaskedTokenizer], Any]:
    if format == STOCK:
        return stock_model
    package()  # refuses to go on without it, in our own words
    from torchdefine.tasks.masked.with_unit import model_with_unit

    return model_with_unit


@torch.no_grad()
def largest_difference(model: MaskedModel, made: Any) -> float:
    """Of log-probabilities on random ids."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.embedding.num_embeddings, (2, min(33, model.encoder.config.most_places)), generator=random
    )
    theirs = made(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)
    ours = model.output.log_prob(model.head(model.hidden(ids)))
    return float(((theirs - ours).abs() / ours.abs().clamp(min=1)).max())


def model_card(recipe: Recipe, result: Mapping[str, Any], licence: str | None, format: str) -> str:
    """The text of ``README.md``."""
    found = {split: result.get(f"{split}_perplexity") for split in ("valid", "test")}
    measured = "".join(
        f"\nMasked perplexity on its {split} text: {value:,.2f}." for split, value in found.items() if value
    )
    title = escaped(recipe.description or recipe.name)
    named = f"license: {json.dumps(licence)}\n" if licence else ""
    return CARD.format(title=title, measured=measured, licence=named, **ABOUT[format])


@contextmanager
def _without_bars() -> Iterator[None]:
    """A file is written in a moment."""
    log = package().logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


def fast_tokenizer(tokens: MaskedTokenizer, longest: int) -> Any:
    """The tokenizer as transformers has it; a text begins with ``<bos>`` and ends with ``<eos>``, as in training."""
    transformers = package()
    from tokenizers import Tokenizer, processors

    own = Tokenizer.from_str(tokens.tokenizer.to_str())
    begin, end = tokens.token(tokens.bos_id), tokens.token(tokens.eos_id)
    ends = [(begin, tokens.bos_id), (end, tokens.eos_id)]
    own.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", f"{begin} $A {end} $B {end}", ends)
    special = {"bos": begin, "cls": begin, "eos": end, "sep": end, "unk": tokens.token(tokens.unk_id)}
    named = {**special, "pad": tokens.token(tokens.pad_id), "mask": tokens.mask}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, model_max_length=longest, **{f"{role}_token": token for role, token in named.items()}
    )

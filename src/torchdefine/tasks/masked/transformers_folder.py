"""A trained run as a folder of transformers: a stock class with the cached table, which loads without torchdefine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding.table import finished_table
from torchdefine.errors import MachineError, UserError
from torchdefine.files import make_weights_readable_as, new_folder, write_text
from torchdefine.output import FullSoftmax
from torchdefine.plain import escaped
from torchdefine.task import Recipe
from torchdefine.tasks.masked.encoder import ROTARY_BASE, EncoderConfig
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.text import MaskedTokenizer

TOLERANCE = 1e-5
"""The largest difference allowed between log-probabilities, relative for those above 1."""
CARD = """---
library_name: transformers
pipeline_tag: fill-mask
{licence}---

# {title}

A masked language model, trained with torchdefine. Its token table is the cached one: the vectors that a small table and
its unit give. It needs no torchdefine.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForMaskedLM.from_pretrained("path/to/this/folder")
```

`SentenceTransformer("path/to/this/folder")` gives the mean of its vectors. It was not trained for sentences: train on.
{measured}
"""
Named = Iterator[tuple[str, Tensor]]


def write_transformers(model: MaskedModel, tokens: MaskedTokenizer, folder: str | Path, card: str) -> float:
    """Write a model in evaluation mode, on the CPU, into a new folder; returns the largest difference to it.

    ``AutoModelForMaskedLM``, ``AutoModel`` and, by the mean over tokens, ``SentenceTransformer`` load it.
    """
    made = stock_model(model, tokens)
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


@torch.no_grad()
def stock_model(model: MaskedModel, tokens: MaskedTokenizer) -> Any:
    """The class of transformers that computes the same, with the model's weights; its table is the cached one."""
    output, config = model.output, model.encoder.config
    if not isinstance(output, FullSoftmax):
        raise UserError(
            f"Models of transformers have one softmax over all tokens, not a {type(output).__name__}: export another "
            "format, or train with output.kind full."
        )
    build, names = (_bert, _bert_weights) if config.norm == "post" else (_modernbert, _modernbert_weights)
    made = build(config, model.encoder.width, tokens)
    table = finished_table(model.embedding)  # (V, width)
    decoder = output.weight if output.projection is None else output.weight @ output.projection.weight  # (V, width)
    bias = torch.zeros(len(table)) if output.bias is None else output.bias
    try:
        made.load_state_dict(dict(names(model, table, decoder, bias)))
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise MachineError(f"This version of transformers has other weights than expected ({detail}).") from None
    return made.eval()


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


def model_card(recipe: Recipe, result: Mapping[str, Any], licence: str | None) -> str:
    """The text of ``README.md``."""
    found = {split: result.get(f"{split}_perplexity") for split in ("valid", "test")}
    measured = "".join(
        f"\nMasked perplexity on its {split} text: {value:,.2f}." for split, value in found.items() if value
    )
    title = escaped(recipe.description or recipe.name)
    named = f"license: {json.dumps(licence)}\n" if licence else ""
    return CARD.format(title=title, measured=measured, licence=named)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("A folder of transformers needs that package: pip install 'torchdefine[hf]'.") from None
    return transformers


@contextmanager
def _without_bars() -> Iterator[None]:
    """A file is written in a moment."""
    log = _transformers().logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


def _sizes(config: EncoderConfig, width: int, tokens: MaskedTokenizer) -> dict[str, Any]:
    """What the configurations of both classes call alike."""
    return {
        "vocab_size": len(tokens),
        "hidden_size": width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": config.most_places,
        "pad_token_id": tokens.pad_id,
        "bos_token_id": tokens.bos_id,
        "eos_token_id": tokens.eos_id,
        "tie_word_embeddings": False,
    }


def _bert(config: EncoderConfig, width: int, tokens: MaskedTokenizer) -> Any:
    _require(config, positions="learned", gated=False)
    transformers = _transformers()
    rates = {
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": nn.LayerNorm(1).eps,
        "type_vocab_size": 1,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**_sizes(config, width, tokens), **rates))


def _bert_weights(model: MaskedModel, table: Tensor, decoder: Tensor, bias: Tensor) -> Named:
    encoder = model.encoder
    assert encoder.positions is not None
    yield "bert.embeddings.word_embeddings.weight", table
    yield "bert.embeddings.position_embeddings.weight", encoder.positions
    yield "bert.embeddings.token_type_embeddings.weight", torch.zeros(1, encoder.width)
    yield from _of("bert.embeddings.LayerNorm", encoder.norm)
    for index, layer in enumerate(encoder.layers):
        own, attention = f"bert.encoder.layer.{index}", layer.attention
        parts = zip(attention.query_key_value.weight.chunk(3), attention.query_key_value.bias.chunk(3), strict=True)
        for name, (weight, offset) in zip(("query", "key", "value"), parts, strict=True):
            yield f"{own}.attention.self.{name}.weight", weight
            yield f"{own}.attention.self.{name}.bias", offset
        yield from _of(f"{own}.attention.output.dense", attention.out)
        yield from _of(f"{own}.attention.output.LayerNorm", layer.attention_norm)
        yield from _of(f"{own}.intermediate.dense", layer.feed_forward.expand)
        yield from _of(f"{own}.output.dense", layer.feed_forward.reduce)
        yield from _of(f"{own}.output.LayerNorm", layer.feed_norm)
    yield from _of("cls.predictions.transform.dense", model.head.dense)
    yield from _of("cls.predictions.transform.LayerNorm", model.head.norm)
    yield "cls.predictions.decoder.weight", decoder
    yield "cls.predictions.decoder.bias", bias
    yield "cls.predictions.bias", bias


def _modernbert(config: EncoderConfig, width: int, tokens: MaskedTokenizer) -> Any:
    _require(config, positions="rotary", gated=True)
    transformers = _transformers()
    turning = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    biased = ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    settings = transformers.ModernBertConfig(
        **_sizes(config, width, tokens),
        **dict.fromkeys(biased, True),
        layer_types=["full_attention"] * config.layers,
        rope_parameters={"full_attention": turning, "sliding_attention": turning},
        cls_token_id=tokens.bos_id,
        sep_token_id=tokens.eos_id,
        norm_eps=nn.LayerNorm(1).eps,
        attention_dropout=config.attention_dropout,
        embedding_dropout=config.dropout,
        mlp_dropout=0.0,
    )
    return transformers.ModernBertForMaskedLM(settings)


def _modernbert_weights(model: MaskedModel, table: Tensor, decoder: Tensor, bias: Tensor) -> Named:
    encoder = model.encoder
    yield "model.embeddings.tok_embeddings.weight", table
    yield from _of("model.embeddings.norm", encoder.norm)
    for index, layer in enumerate(encoder.layers):
        own = f"model.layers.{index}"
        if layer.attention_norm is not None:
            yield from _of(f"{own}.attn_norm", layer.attention_norm)
        yield from _of(f"{own}.attn.Wqkv", layer.attention.query_key_value)
        yield from _of(f"{own}.attn.Wo", layer.attention.out)
        yield from _of(f"{own}.mlp_norm", layer.feed_norm)
        yield from _of(f"{own}.mlp.Wi", layer.feed_forward.expand)
        yield from _of(f"{own}.mlp.Wo", layer.feed_forward.reduce)
    assert encoder.last_norm is not None
    yield from _of("model.final_norm", encoder.last_norm)
    yield from _of("head.dense", model.head.dense)
    yield from _of("head.norm", model.head.norm)
    yield "decoder.weight", decoder
    yield "decoder.bias", bias


def _require(config: EncoderConfig, **values: Any) -> None:
    """Refuse an encoder that no class of transformers has."""
    for name, value in values.items():
        if getattr(config, name) != value:
            raise UserError(
                f"No class of transformers has an encoder with context.norm {config.norm} and context.{name} "
                f"{getattr(config, name)}: train with post, learned and no gate as BERT, or pre, rotary and a gate as "
                "ModernBERT."
            )


def _of(name: str, module: nn.Linear | nn.LayerNorm) -> Named:
    yield f"{name}.weight", module.weight
    yield f"{name}.bias", module.bias


def fast_tokenizer(tokens: MaskedTokenizer, longest: int) -> Any:
    """The tokenizer as transformers has it; a text begins with ``<bos>`` and ends with ``<eos>``, as in training."""
    transformers = _transformers()
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

"""The stock class of transformers that computes what a run's model does, with the run's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding.table import finished_table
from torchdefine.errors import MachineError, UserError
from torchdefine.output import FullSoftmax
from torchdefine.tasks.masked.encoder import ROTARY_BASE, EncoderConfig
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.text import MaskedTokenizer

Named = Iterator[tuple[str, Tensor]]


@torch.no_grad()
def stock_model(model: MaskedModel, tokens: MaskedTokenizer) -> Any:
    """The class of transformers that computes the same, with the model's weights; its table is the cached one."""
    output, table = full_softmax(model), finished_table(model.embedding)  # (V, width)
    decoder = output.weight if output.projection is None else output.weight @ output.projection.weight  # (V, width)
    return filled(model, tokens, table, decoder, tied=torch.allclose(decoder, table, rtol=1e-6, atol=0))


def full_softmax(model: MaskedModel) -> FullSoftmax:
    """The model's output layer, if a class of transformers can have it."""
    if not isinstance(model.output, FullSoftmax):
        raise UserError(
            f"Models of transformers have one softmax over all tokens, not a {type(model.output).__name__}: export "
            "another format, or train with output.kind full."
        )
    return model.output


@torch.no_grad()
def filled(model: MaskedModel, tokens: MaskedTokenizer, table: Tensor, decoder: Tensor, *, tied: bool) -> Any:
    """The class of transformers for a model's encoder, with its weights, a table and an output matrix."""
    config, bias = model.encoder.config, full_softmax(model).bias
    build, names = (_bert, _bert_weights) if config.norm == "post" else (_modernbert, _modernbert_weights)
    made = build(config, tie_word_embeddings=tied, **_sizes(config, model.encoder.width, tokens))
    weights = names(model, table, decoder, torch.zeros(len(table)) if bias is None else bias)
    try:
        made.load_state_dict(dict(weights))
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise MachineError(f"This version of transformers has other weights than expected ({detail}).") from None
    return made.eval()


def package() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("A folder of transformers needs that package: pip install 'torchdefine[hf]'.") from None
    return transformers


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
        "cls_token_id": tokens.bos_id,
        "sep_token_id": tokens.eos_id,
    }


def _bert(config: EncoderConfig, **sizes: Any) -> Any:
    _require(config, positions="learned", gated=False)
    transformers = package()
    rates = {
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": nn.LayerNorm(1).eps,
        "type_vocab_size": 1,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **rates))


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


def _modernbert(config: EncoderConfig, **sizes: Any) -> Any:
    _require(config, positions="rotary", gated=True)
    transformers = package()
    turning = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    biased = ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    settings = transformers.ModernBertConfig(
        **sizes,
        **dict.fromkeys(biased, True),
        layer_types=["full_attention"] * config.layers,
        rope_parameters={"full_attention": turning, "sliding_attention": turning},
        classifier_pooling="mean",  # the vector of the first token was never trained
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

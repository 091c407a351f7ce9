"""Which programs a model is exported as, what goes into each of them and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.context import LSTM, TransformerXL
from torchdefine.errors import UserError
from torchdefine.inference.export_steps import (
    DecoderStep,
    EmbeddingProgram,
    EncoderProgram,
    LSTMStep,
    TransformerXLStep,
    decoder_state,
    flat,
    in_pairs,
)
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.translation.model import Translator

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a program or comes out of it."""

    name: str
    shape: tuple[int | str, ...]
    """A name stands for a size that each call may choose; equal names mean equal sizes."""
    dtype: str = "float32"
    below: int = 1
    """Whole numbers must be smaller than this."""
    padding: int | None = None
    """The id that fills the ends of short rows."""

    def sample(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Numbers that the program must accept, of these sizes; at least one place of every row is not padding."""
        shape = self.sized(sizes)
        if self.dtype == "float32":
            return torch.randn(shape, generator=generator)
        if self.dtype == "bool":
            chosen = torch.rand(shape, generator=generator) < 0.7
            chosen[..., 0] = True
            return chosen
        ids = torch.randint(self.below, shape, generator=generator)
        if self.padding is not None:
            ids[ids == self.padding] = (self.padding + 1) % self.below
            ids[0, shape[-1] // 2 + 1 :] = self.padding
        return ids

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)

    def to_dict(self) -> dict[str, Any]:
        ids = {"below": self.below} if self.dtype == "int64" else {}
        padding = {} if self.padding is None else {"padding": self.padding}
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, **ids, **padding}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Port:
        shape = tuple(values["shape"])
        return cls(values["name"], shape, values["dtype"], values.get("below", 1), values.get("padding"))


@dataclass(frozen=True)
class Program:
    """A part of a model that runs by itself; its first input is ids, the others are carried tensors."""

    name: str
    summary: str
    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    eager: Callable[..., Sequence[Tensor]]
    """What the model itself gives for the same inputs."""


def sampled(ports: Sequence[Port], sizes: Mapping[str, int], seed: int) -> list[Tensor]:
    """Numbers for all inputs of a program."""
    generator = torch.Generator().manual_seed(seed)
    return [port.sample(sizes, generator) for port in ports]


def programs_of(model: LanguageModel | Translator) -> list[Program]:
    """A language model's embedding and its step; a translator's encoder and decoder. The model is in evaluation mode.

    A foreign context model has no step here: only the embedding is exported.
    """
    if isinstance(model, Translator):
        return [_encoder(model), _decoder(model)]
    if not isinstance(model, LanguageModel):
        raise UserError(f"A {type(model).__name__} cannot be exported: give a language model or a translator.")
    programs = [_embedding(model)]
    if isinstance(model.context, LSTM):
        programs.append(_lstm_step(model))
    elif isinstance(model.context, TransformerXL):
        programs.append(_transformer_xl_step(model))
    return programs


def _embedding(model: LanguageModel) -> Program:
    embedding = model.embedding
    how = "computed" if embedding.looked_up is None else "unpacked from a compressed table"
    how = "looked up in the finished table" if embedding.cached_vectors is not None else how
    return Program(
        "embedding",
        f"Ids to the vectors that the model reads, {how}.",
        EmbeddingProgram(embedding),
        (Port("ids", ("batch", "length"), "int64", embedding.num_embeddings),),
        (Port("vectors", ("batch", "length", embedding.embedding_dim)),),
        lambda ids: [embedding(ids)],
    )


def _lstm_step(model: LanguageModel) -> Program:
    def eager(ids: Tensor, *state: Tensor) -> list[Tensor]:
        before = [(hidden[None], cell[None]) for hidden, cell in in_pairs(state)]
        log_probs, after = model.log_prob(ids[:, None], before)
        return [log_probs[:, 0], *(tensor[0] for tensor in flat(after))]

    names, initial = ("hidden", "cell"), enumerate(model.initial_state(1))
    widths = [(f"{name}_{layer}", h.shape[-1]) for layer, (h, _) in initial for name in names]
    state = [Port(name, ("batch", width)) for name, width in widths]
    return Program(
        "step",
        "One token further: ids and the state of the LSTM to log-probabilities of the next token and the state after. "
        "The state starts at zero.",
        LSTMStep(model),
        (Port("ids", ("batch",), "int64", model.embedding.num_embeddings), *state),
        (Port("log_probs", ("batch", model.output.num_embeddings)), *_after(state)),
        eager,
    )


def _transformer_xl_step(model: LanguageModel) -> Program:
    def eager(ids: Tensor, filled: Tensor, *memories: Tensor) -> list[Tensor]:
        hidden, (after, now_filled) = model.hidden(ids, (list(memories), filled))
        return [model.output.log_prob(hidden[:, -1]), now_filled, *after]

    memories, _ = model.initial_state(1)
    _, length, width = memories[0].shape
    state = [
        Port("filled", (1,), "int64", length + 1),
        *(Port(f"memory_{layer}", ("batch", length, width)) for layer in range(len(memories))),
    ]
    return Program(
        "step",
        "Some tokens further: ids and the memory to log-probabilities of the token after the last, and the memory "
        f"after. `filled` says how many of its {length} positions were written; it and the memory start at zero.",
        TransformerXLStep(model),
        (Port("ids", ("batch", "length"), "int64", model.embedding.num_embeddings), *state),
        (Port("log_probs", ("batch", model.output.num_embeddings)), *_after(state)),
        eager,
    )


def _encoder(model: Translator) -> Program:
    def eager(ids: Tensor) -> list[Tensor]:
        encoded, visible = model.encode(ids)
        return [encoded, visible, *flat(model.start(ids).memory)]

    ids = Port("ids", ("batch", "source_length"), "int64", model.source.num_embeddings, model.pad_id)
    return Program(
        "encoder",
        f"A source, ended by its end token and filled up with the id {model.pad_id}, to its vectors, where they are no "
        "padding, and the keys and values that the decoder asks for.",
        EncoderProgram(model),
        (ids,),
        (
            Port("encoded", ("batch", "source_length", model.transformer.shape.width)),
            Port("visible", ("batch", "source_length"), "bool"),
            *_keys_and_values(model, "source_", "source_length"),
        ),
        eager,
    )


def _decoder(model: Translator) -> Program:
    def eager(ids: Tensor, visible: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
        log_probs, after = model.step(ids, decoder_state(visible, keys_and_values))
        return [log_probs, *flat(after.own)]

    own = _keys_and_values(model, "", "target_length")
    return Program(
        "decoder",
        "The last token of every target, what the encoder gave and the target's keys and values so far, none at the "
        "start, to log-probabilities of the next token and the keys and values with this one.",
        DecoderStep(model),
        (
            Port("ids", ("batch",), "int64", model.target.num_embeddings),
            Port("visible", ("batch", "source_length"), "bool"),
            *_keys_and_values(model, "source_", "source_length"),
            *own,
        ),
        (Port("log_probs", ("batch", model.output.num_embeddings)), *_after(own, longer="target_length + 1")),
        eager,
    )


def _keys_and_values(model: Translator, prefix: str, length: str) -> list[Port]:
    shape = model.transformer.shape
    sizes = ("batch", shape.heads, length, shape.width // shape.heads)
    return [
        Port(f"{prefix}{what}_{layer}", sizes) for layer in range(shape.decoder_layers) for what in ("key", "value")
    ]


def _after(state: Sequence[Port], longer: str | None = None) -> list[Port]:
    """The carried tensors as outputs; ``longer`` is their new length, if they grow."""
    return [
        Port(
            f"{port.name}_after",
            tuple(longer if longer and size == "target_length" else size for size in port.shape),
            port.dtype,
            port.below,
        )
        for port in state
    ]

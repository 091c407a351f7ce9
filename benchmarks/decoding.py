"""Beam search with a base Transformer, beside the same model and search of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measuring import Contestant, Goal, Group, Prepared, Setting
from benchmarks.records import Benchmark
from benchmarks.texts import real_text
from torchdefine.embedding import VocabularyFacts
from torchdefine.recipe import load_recipe
from torchdefine.tasks.translation import Translator, build_translator
from torchdefine.tasks.translation.beam import BeamConfig, TargetTokens, beam_search

PAD, BOS, EOS = 0, 1, 2
BEAM = 4


@dataclass(frozen=True)
class Shape:
    """Sentences are of one length, and so are their targets: weights that nobody trained never end one."""

    sentences: int
    length: int
    vocabulary: int
    width: int
    layers: int

    @property
    def sizes(self) -> dict[str, Any]:
        stack = {"encoder_layers": self.layers, "decoder_layers": self.layers, "hidden_dim": 4 * self.width}
        return {"unit": {"embedding_dim": self.width}, "context": stack}


def ours(recipe: str, shape: Shape, batch_size: int, setting: Setting, cached: bool = False) -> Prepared:
    torch.manual_seed(1)
    sizes = shape.sizes
    if recipe == "europarl/transformer":
        sizes = {"embedding": {"map_dim": shape.width}, "context": sizes["context"]}
    facts = VocabularyFacts(shape.vocabulary)
    with setting.device:
        model = build_translator(load_recipe(recipe, sizes), facts, facts, PAD).eval()
    if cached:
        _look_up(model)
    tokens = TargetTokens(BOS, EOS, PAD, (PAD, BOS))
    options = BeamConfig(BEAM, max_ratio=0.0, max_extra=shape.length)
    sources = _sources(shape, setting).tolist()

    def work() -> int:
        found = [
            hypotheses
            for at in range(0, len(sources), batch_size)
            for hypotheses in beam_search(model, sources[at : at + batch_size], tokens, options)
        ]
        assert all(len(hypotheses[0].ids) == shape.length - 1 for hypotheses in found)
        return len(found)

    return Prepared(work, lambda: {"parameters": sum(p.numel() for p in model.parameters())})


def _look_up(model: Translator) -> None:
    for embedding in model.embeddings().values():
        embedding.look_up(embedding.table())


def theirs(shape: Shape, batch_size: int, setting: Setting) -> Prepared:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=4 * shape.width,
        decoder_ffn_dim=4 * shape.width,
        max_position_embeddings=256,
        pad_token_id=PAD,
        decoder_start_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
    )
    with setting.device:
        model: Any = MarianMTModel(config).eval()
    sources = _sources(shape, setting).to(setting.device)
    wanted = {"num_beams": BEAM, "max_new_tokens": shape.length, "min_new_tokens": shape.length, "do_sample": False}

    @torch.inference_mode()
    def work() -> int:
        made = [
            model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), length_penalty=0.6, **wanted)
            for batch in sources.split(batch_size)
        ]
        assert all(batch.shape[1] == shape.length + 1 for batch in made)  # <bos> stands before them
        return sum(len(batch) for batch in made)

    return Prepared(work, lambda: {"parameters": sum(p.numel() for p in model.parameters())})


def _sources(shape: Shape, setting: Setting) -> torch.Tensor:
    words = real_text(setting.data).ids((shape.sentences, shape.length - 1), torch.device("cpu"), shape.vocabulary)
    return torch.cat((words.clamp(min=EOS + 1), torch.full((shape.sentences, 1), EOS)), dim=1)  # (n, S)


def groups(setting: Setting) -> Iterator[Group]:
    shape = Shape(16, 16, 2000, 128, 2) if setting.small else Shape(256, 32, 32_000, 512, 6)
    few, many = (4, 16) if setting.small else (64, 256)
    lacks = "" if importlib.util.find_spec("transformers") else "it needs the package transformers"
    plain, define = "europarl/transformer", "europarl/transformer-define"
    contestants = [
        Contestant(f"transformers, {few} at once", lambda: theirs(shape, few, setting), lacks),
        Contestant(f"transformers, {many} at once", lambda: theirs(shape, many, setting), lacks),
        Contestant(f"tables, {few} at once", lambda: ours(plain, shape, few, setting)),
        Contestant(f"tables, {many} at once", lambda: ours(plain, shape, many, setting)),
        Contestant(f"DeFINE, {many} at once", lambda: ours(define, shape, many, setting)),
        Contestant(f"DeFINE cached, {many} at once", lambda: ours(define, shape, many, setting, cached=True)),
    ]
    cached = Goal(
        f"DeFINE cached, {many} at once: times as long as tables, {many} at once",
        lambda rows: rows[f"DeFINE cached, {many} at once"].ms / rows[f"tables, {many} at once"].ms,
        1.05,
        at_most=True,
    )
    note = f"{shape.sentences} sentences of {shape.length} tokens into as many, a beam of {BEAM}, float32"
    yield Group("beam search", contestants, [cached], note)


BENCHMARK = Benchmark("decoding", "beam search beside that of transformers", groups)

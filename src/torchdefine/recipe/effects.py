"""Which settings of a recipe have no effect beside its other settings, and which follow from them."""

from __future__ import annotations

from typing import Any

from torchdefine.embedding.plan import default_max_groups
from torchdefine.embedding.unit import VARIANTS, UnitOptions
from torchdefine.recipe.recipe import OF_STREAMS, Recipe

_OF_A_DEFINE_UNIT = ("depth", "max_groups", "groups", "skip", "reach_expand_dim", "rounding", "multiple_of")
_OF_ITS_LAYERS = ("fixed_width", "norm", "activation", "dropout")
_OF_ATTENTION = ("heads", "head_dim", "inner_dim", "pre_norm", "memory", "same_length", "clamp", "attention_dropout")
_OF_ITS_EVALUATION = ("eval_memory", "eval_same_length", "eval_clamp")


def settings_without_effect(recipe: Recipe) -> set[str]:
    """Dotted names of settings that may have any value; those that a registered part reads are never among them."""
    found = {
        "data": _of_data(recipe),
        "embedding": _of_the_embedding(recipe),
        "context": _of_the_context_model(recipe),
        "output": _of_the_output(recipe),
        "optim": _of_the_optimiser(recipe),
        "schedule": _of_the_schedule(recipe),
        "train": set(OF_STREAMS) if recipe.task == "translation" else set(),
    }
    return {f"{section}.{name}" for section, names in found.items() for name in names}


def implied_settings(recipe: Recipe) -> dict[str, Any]:
    """The values of settings that a recipe leaves open (None), by dotted name, as far as known without a text.

    How a registered part uses its settings is not known.
    """
    known: dict[str, Any] = {"eval.valid_batch_size": recipe.eval.batch_size}
    if recipe.embedding.kind == "tokens":
        known |= _implied_by_the_embedding(recipe)
    return {name: value for name, value in known.items() if _is_open(recipe, name)}


def _is_open(recipe: Recipe, name: str) -> bool:
    section, _, setting = name.partition(".")
    return section in recipe.used_sections() and getattr(getattr(recipe, section), setting) is None


def _implied_by_the_embedding(recipe: Recipe) -> dict[str, Any]:
    settings, context = recipe.embedding, recipe.context
    projected = settings.projected_dim or settings.embedding_dim or settings.map_dim
    width = settings.embedding_dim or (projected if settings.map == "projective" else settings.map_dim)
    spread = round(settings.map_dim**-0.5, 6)
    known: dict[str, Any] = {
        "embedding.embedding_dim": width,
        "embedding.projected_dim": projected,
        "embedding.init_std": spread,
        "embedding.projection_std": spread,
    }
    if settings.unit in VARIANTS:
        rules = UnitOptions.of(settings.unit).rules
        known |= {"embedding.groups": rules.groups, "embedding.skip": rules.skip}
        known["embedding.max_groups"] = default_max_groups(settings.depth)
    if context.kind == "lstm":
        known["context.output_dim"] = settings.map_dim if recipe.output.tied else context.hidden_dim
    elif context.kind == "transformer-xl":
        known |= {"context.head_dim": width // context.heads, "context.inner_dim": 4 * width}
        known["context.eval_memory"] = context.memory
    return known


def _of_data(recipe: Recipe) -> set[str]:
    has_words = recipe.task == "language" and recipe.data.tokenizer is None
    return set() if has_words else {"min_count", "max_size"}


def _of_the_embedding(recipe: Recipe) -> set[str]:
    settings = recipe.embedding
    if settings.kind != "tokens" or recipe.transformer.source_embedding:  # the source side may be another kind of table
        return set()
    unused = {"options"}
    if settings.map != "projective":
        unused |= {"projected_dim", "projection_std"}
    if settings.map != "adaptive":
        unused |= {"cutoffs", "division"}
    if settings.scale is not None:
        unused.add("scaled")
    if settings.unit == "none":
        unused.add("equalised")
    if settings.unit in ("none", "projection"):
        unused.add("expand_dim")
    if settings.unit in ("none", "projection", "mlp"):
        unused |= {*_OF_A_DEFINE_UNIT, *_OF_ITS_LAYERS}
    return unused


def _of_the_context_model(recipe: Recipe) -> set[str]:
    settings = recipe.context
    if settings.kind == "transformer-xl":
        return {"hidden_dim", "output_dim", "recurrent_dropout", "state_dropout", "options"}
    if settings.kind != "lstm":
        return set()
    unused = {*_OF_ATTENTION, *_OF_ITS_EVALUATION, "options"}
    if settings.layers == 1:
        unused.add("hidden_dropout")
        if recipe.output.tied or settings.output_dim is not None:  # these set the width of the last layer
            unused.add("hidden_dim")
    return unused


def _of_the_output(recipe: Recipe) -> set[str]:
    settings, has_bands = recipe.output, recipe.embedding.map == "adaptive"
    if settings.kind not in ("full", "adaptive", "mixture"):
        return set()
    unused = {"options"}
    if settings.kind != "mixture":
        unused |= {"components", "latent_dropout"}
    if recipe.embedding.kind != "tokens":  # its map may be of any kind
        return unused
    if settings.kind != "adaptive" or has_bands:
        unused |= {"cutoffs", "tied_projections"}
    if settings.kind == "adaptive" or (settings.kind == "mixture" and has_bands):
        unused.add("bias")
    return unused


def _of_the_optimiser(recipe: Recipe) -> set[str]:
    unused = {"beta1", "beta2"} if recipe.optim.optimizer == "sgd" else {"momentum"}
    goes_by_stalls = recipe.optim.averaging == "stalled" or recipe.train.stop_when_stalled
    return unused if goes_by_stalls else unused | {"stall_patience"}


def _of_the_schedule(recipe: Recipe) -> set[str]:
    kinds = {
        "noam_width": ("noam",),
        "drops": ("drops",),
        "factor": ("drops", "plateau"),
        "patience": ("plateau",),
        "decay_from": ("cosine", "linear"),
        "final_ratio": ("cosine", "linear"),
    }
    return {name for name, of in kinds.items() if recipe.schedule.kind not in of}

"""A model of transformers and its tokenizer with the tokens that a text uses, and few others (extra ``hf``)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.adapt.huggingface import transformers
from torchdefine.adapt.sentences import check_has_row
from torchdefine.adapt.tokenizer_json import trimmed_tokenizer
from torchdefine.errors import UserError

_NAMES_TOKENS = re.compile(r"_token_(id|ids|index)$|^(begin_)?suppress_tokens$|^bad_words_ids$|^lang_code_to_id$")
"""Settings of a model or of its generation that hold ids: a number, a list of numbers, or names with numbers."""


@dataclass(frozen=True)
class Trimmed:
    """What is left of a model and its tokenizer; the model shares the weights of no token with the one that it was."""

    model: Any
    tokenizer: Any
    old_ids: list[int]
    """The former id of every token, in the order of the new ids."""


@torch.no_grad()
def trim_vocabulary(model: Any, tokenizer: Any, wanted: Iterable[int]) -> Trimmed:
    """A model and its tokenizer with the ``wanted`` tokens and those that either cannot do without.

    Both given ones stay as they are. A text whose tokens are all kept is split as before, and the new model does with
    it what the old one did. Tokens that a configuration names are kept, and named by their new numbers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = type(tokenizer).__name__
        raise UserError(f"A {kind} has no tokenizer.json, which is what can be trimmed: keep its vocabulary.")
    if getattr(model.config, "share_encoder_decoder_embeddings", True) is False:
        raise UserError("This model has one vocabulary for each side, and only one can be trimmed: keep them.")
    rows, size = model.get_input_embeddings().num_embeddings, len(tokenizer)
    named = {id_ for _, _, value in _named_tokens(model) for id_ in _numbers(value)}
    if missing := sorted(id_ for id_ in named if size <= id_ < rows):
        raise UserError(f"The model names the token {missing[0]}, which its tokenizer does not have: keep all tokens.")
    always = {*tokenizer.all_special_ids, *range(_fixed_below(model)), *named}
    made = trimmed_tokenizer(json.loads(backend.to_str()), {*wanted, *always})
    check_has_row(max(made.old_ids), rows)
    smaller = copy.deepcopy(model, {id(one): one for one in model.parameters() if rows not in one.shape})
    _keep_rows(smaller, made.old_ids)
    new_ids = {old: new for new, old in enumerate(made.old_ids)}
    for config, name, value in list(_named_tokens(smaller)):
        setattr(config, name, _renumbered(value, new_ids))
    return Trimmed(smaller, _reloaded(tokenizer, made.settings), made.old_ids)


def _fixed_below(model: Any) -> int:
    """The padding token, if positions are counted from its id, as RoBERTa's are: then it must keep its number."""
    found = (getattr(part, "padding_idx", None) for name, part in model.named_modules() if "position" in name)
    return max((padding for padding in found if padding is not None), default=0)


def _named_tokens(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Where ids stand in a model's configurations, those within them and that of generation: (which, name, value)."""
    waiting = [model.config, getattr(model, "generation_config", None)]
    while waiting:
        config = waiting.pop()
        for name, value in vars(config).items() if config is not None else ():
            if isinstance(value, transformers.PreTrainedConfig):
                waiting.append(value)
            elif _NAMES_TOKENS.search(name):
                yield config, name, value


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(one)


def _renumbered(value: Any, new_ids: Mapping[int, int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _renumbered(one, new_ids) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_renumbered(one, new_ids) for one in value]
    return new_ids.get(value, value)


def _keep_rows(model: Any, old_ids: Sequence[int]) -> None:
    """Let a model have these rows only: transformers resizes all that goes with a vocabulary, and we fill it in."""
    before, kept = _tensors(model), torch.tensor(old_ids)
    padding = {name: part.padding_idx for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    model.resize_token_embeddings(len(old_ids), mean_resizing=False)
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:  # some models now share it, though they are not tied
        output.bias = nn.Parameter(output.bias.detach().clone(), output.bias.requires_grad)
        model.tie_weights()
    resized = {name: tensor for name, tensor in _tensors(model).items() if tensor.shape != before[name].shape}
    for name, tensor in resized.items():
        old = before[name]
        (side,) = (side for side, size in enumerate(tensor.shape) if size != old.shape[side])
        tensor.copy_(old.index_select(side, kept.to(old.device)))
    for name, number in padding.items():
        if number is not None and f"{name}.weight" in resized:
            model.get_submodule(name).padding_idx = old_ids.index(number) if number in old_ids else None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model by name, as they are now, whatever takes their places later."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def _reloaded(tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """The tokenizer with these settings as transformers loads it, which may build parts of it anew."""
    made = copy.deepcopy(tokenizer)
    made._tokenizer = type(made.backend_tokenizer).from_str(json.dumps(settings))
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        again = type(tokenizer).from_pretrained(folder, local_files_only=True)
    if again.get_vocab() != made.get_vocab():
        kind = type(tokenizer).__name__
        raise UserError(f"A {kind} adds tokens to its file when it is loaded, so it cannot be trimmed: keep all.")
    return again

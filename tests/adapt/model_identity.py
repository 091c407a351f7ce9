"""What a model is, as one hash."""

import hashlib
from typing import Any

import torch
from torch import nn


def model_hash(model: nn.Module) -> str:
    """Everything that a model is: its modules, tensors, sharing, modes and, if it has one, its configuration."""
    digest = hashlib.sha256(repr(model).encode())
    for name, module in model.named_modules(remove_duplicate=False):
        ties = module.__dict__.get("_tied_weights_keys"), module.__dict__.get("all_tied_weights_keys")
        digest.update(f"{name} {type(module)} {id(type(module))} {module.training} {ties}".encode())
    hash_tensors(digest, model)
    if hasattr(model, "config"):
        digest.update(f"{id(type(model.config))} {model.config.to_json_string()}".encode())
    return digest.hexdigest()


def hash_tensors(digest: Any, model: nn.Module) -> None:
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            digest.update(f"{name} {id(tensor)} {tensor.dtype} {tensor.device} {tensor.requires_grad}".encode())
            if type(tensor.data) is torch.Tensor:
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())

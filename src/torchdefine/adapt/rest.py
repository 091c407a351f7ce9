"""The rest of a model in 8 bits, by torchao: its linear layers, so that the whole folder shrinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torchdefine.adapt.model_folder import weight_bytes
from torchdefine.errors import UserError, in_a_line

Rest = Literal["keep", "int8"]


def int8_config() -> Any:
    """What transformers needs to round linear layers as it loads them; refused without torchao."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-untyped]
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    except ImportError:
        raise UserError("--rest int8 needs torchao: pip install torchao, or leave the option out.") from None


def round_rest(folder: Path, model: Any) -> Any:
    """Store the linear layers of the model in a folder in 8 bits a weight; the model that the folder now holds.

    The table, output layers and whatever else is no linear layer stay as they are.
    """
    config, size, name = int8_config(), weight_bytes(folder), type(model).__name__
    device = model.device
    try:
        rounded = type(model).from_pretrained(folder, quantization_config=config)
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        rounded.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).to(device).eval()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = in_a_line(error)
        raise UserError(
            f"A {name} cannot be kept in int8 by torchao ({reason}): leave its other layers as they are."
        ) from None
    if weight_bytes(folder) >= size:
        raise UserError(
            f"torchao rounds linear layers, and a {name} has none that it knows: leave its other layers as they are."
        )
    return loaded

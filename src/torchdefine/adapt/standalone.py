"""A model with packed tables as a folder that transformers loads without torchdefine, if its user allows code.

The code lies beside the model, as transformers' ``auto_map`` has it: our classes for looking vectors up, and a model
that puts them where its tables were. It is written here and never run.
"""

from __future__ import annotations

import shutil
from base64 import encodebytes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchdefine.adapt.adapted_card import measured
from torchdefine.adapt.bundled import bundled
from torchdefine.adapt.huggingface import GUARD
from torchdefine.adapt.model_folder import CARD_FILE, CONFIG_FILE, carry_over, check_carried_over, open_model
from torchdefine.adapt.pretrained import RECIPE, auto_classes
from torchdefine.errors import UserError
from torchdefine.files import check_new_folder, new_folder, read_json, write_json, write_text
from torchdefine.sealed_tensors import bytes_of_tensor
from torchdefine.tables import CompactTable
from torchdefine.tables.rows import kinds_of_rows, rows_from
from torchdefine.tables.trellis import TrellisRows, shipped

CODE_FILE = "modeling_compact.py"
_OPENING = '''"""{architecture} with a compact token table, for trust_remote_code=True; made by torchdefine."""

from __future__ import annotations

from transformers import {config}, {architecture}
'''
_MODEL = '''class CompactEmbedding(nn.Module):
    """Ids to vectors, unpacked as they are needed; ``weight`` is no table, but a mark in the file."""

    def __init__(self, described):
        super().__init__()
        table = described["table"]
        self.table = CompactTable(rows_from(table["rows"]), padding_idx=table["padding_idx"])
        for name, parameter in self.table.named_parameters():
            if name in described["dtypes"]:
                parameter.data = parameter.data.to(getattr(torch, described["dtypes"][name]))
        self.scale = described["scales"][described["name"]]
        self.register_buffer("weight", torch.ones(1))

    num_embeddings = property(lambda self: self.table.num_embeddings)
    embedding_dim = property(lambda self: self.table.embedding_dim)
    padding_idx = property(lambda self: self.table.padding_idx)

    def forward(self, ids):
        return self.table(ids).to(self.weight.dtype) * self.scale


class CompactConfig({config}):
    model_type = "{model_type}"


class CompactModel({architecture}):
    config_class = CompactConfig

    def __init__(self, config, *arguments, **options):
        super().__init__(config, *arguments, **options)
        base = self.base_model_prefix
        prefix = base + "." if base and hasattr(self, base) else ""
        for described in config.torchdefine["tables"]:
            parent, _, name = (prefix + described["name"]).rpartition(".")
            setattr(self.get_submodule(parent), name, CompactEmbedding(described))
'''
_SHIPPED = """from base64 import b64decode


def shipped(name):
    return torch.frombuffer(bytearray(b64decode(SHIPPED[name])), dtype=torch.float16)


SHIPPED = {{}}
{entries}"""
_ENTRY = '''SHIPPED["{name}"] = """
{text}"""
'''
_CARD = """---
library_name: transformers
---

# {architecture} with a compact token table

The code for the table lies beside the model, in `{code}`. Read it, and allow it:

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder", trust_remote_code=True)
```
"""


def write_standalone(folder: str | Path, out: str | Path) -> dict[str, Any]:
    """Write a folder that ``adapt`` left with the code that its table needs; returns what was written.

    The model's output layer must not share the table, and the table must not be one of a fitted unit.
    """
    folder, out = Path(folder), Path(out)
    check_new_folder(out)
    model, _ = open_model(folder, packed=True)  # refuses what is damaged, and what is no class of transformers
    recipe = getattr(model.config, RECIPE, None)
    if recipe is None:
        raise UserError(f"The model in {folder} has no table of torchdefine: make it smaller by adapt first.")
    plain: Any = type(model).__bases__[1]
    settings = read_json(folder / CONFIG_FILE)
    kinds = {kind for entry in recipe["tables"] for kind in _encodings(entry["table"].get("rows"))}
    if any(entry["tied"] or len(entry["scales"]) > 1 or "rows" not in entry["table"] for entry in recipe["tables"]):
        raise UserError("The table of this model is used in several places, which only torchdefine can load.")
    if "unit" in kinds:
        raise UserError("The table of this model has a fitted unit, which only torchdefine can load.")
    check_carried_over(folder, out)
    names = {"architecture": plain.__name__, "config": plain.config_class.__name__}
    model_type = f"compact-{recipe['own_type']}"
    auto = auto_classes(plain)
    memories = {part.memory for part in model.modules() if isinstance(part, TrellisRows)}
    code = bundled([CompactTable, rows_from, *(kinds_of_rows(kinds))], left_out=[shipped.__name__])
    parts = [_OPENING.format(**names) + code, _MODEL.format(**names, model_type=model_type)]
    if memories:
        parts.append(_SHIPPED.format(entries="".join(map(_codebooks, sorted(memories)))))
    with new_folder(out) as making:
        carry_over(folder, making)
        for path in folder.glob("*.safetensors*"):
            shutil.copyfile(path, making / path.name)
        write_text(making / CODE_FILE, "\n\n".join(parts))
        module = CODE_FILE.removesuffix(".py")
        own = {name: value for name, value in settings.items() if name != GUARD} | {"model_type": model_type}
        found = dict.fromkeys(auto, f"{module}.CompactModel")
        write_json(making / CONFIG_FILE, {**own, "auto_map": {"AutoConfig": f"{module}.CompactConfig", **found}})
        card = _CARD.format(**names, code=CODE_FILE, auto=auto[0] if auto else "AutoModel")
        write_text(making / CARD_FILE, "\n\n".join([card.rstrip(), *measured(making, "transformers")]) + "\n")
    return {
        "code": CODE_FILE,
        "classes": auto,
        "bytes": sum(one.stat().st_size for one in out.rglob("*") if one.is_file()),
    }


def _codebooks(memory: int) -> str:
    """The codebooks of trellis-coded numbers, to be read back by the code."""
    name = f"values {memory}"
    return _ENTRY.format(name=name, text=encodebytes(bytes_of_tensor(shipped(name))).decode())


def _encodings(described: Any) -> Iterator[str]:
    """The kinds of rows that a description names, at any depth."""
    if isinstance(described, dict) and "encoding" in described:
        yield described["encoding"]
    if isinstance(described, dict | list):
        for one in described.values() if isinstance(described, dict) else described:
            yield from _encodings(one)

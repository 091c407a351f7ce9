"""The note in a saved model's folder for readers who do not know torchdefine."""

from __future__ import annotations

from pathlib import Path

from torchdefine.files import write_text

NOTE_FILE = "README.md"
_NOTE = """---
library_name: torchdefine
---

# {architecture} with a compact token table

The token table of this model is one of torchdefine, so the model loads only with that package:

```
pip install 'torchdefine[hf]'
```

```python
import torchdefine
from transformers import AutoModel  # or the Auto class for your task; the model was saved as {architecture}

model = AutoModel.from_pretrained("path/to/this/folder")
```

Without `import torchdefine`, transformers says that the checkpoint "has model type `torchdefine` but Transformers does
not recognize this architecture", and advises to update transformers. An update does not help; the import does.
"""


def leave_note(folder: Path, architecture: str) -> None:
    """Say in a saved model's folder how it is loaded, unless the folder has a README already."""
    if folder.is_dir() and not (folder / NOTE_FILE).exists():
        write_text(folder / NOTE_FILE, _NOTE.format(architecture=architecture))

#!/bin/bash
# `make wheel`: the built wheel in an environment of its own, far from the checkout, does what the README promises.
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "$2")
size=$(stat -c %s "$wheel" 2>/dev/null || stat -f %z "$wheel")
if [ "$size" -gt 7000000 ]; then echo "The wheel has $size bytes, but should have 7 MB at most." >&2; exit 1; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3.11}" -m venv env
env/bin/pip install --disable-pip-version-check -q -c "$constraints" "$wheel[plot]"
env/bin/torchdefine --version
env/bin/torchdefine recipes demo
env/bin/torchdefine train demo/adaptive-projection --out run --train.steps 20 --train.eval_every 20
env/bin/torchdefine compress run
env/bin/torchdefine eval run --compressed
env/bin/torchdefine report run --out report.html
test -s report.html
env/bin/python - <<'PYTHON'
import torch
from torch import nn
from torchdefine import replace_embeddings

model = nn.Sequential(nn.Embedding(20_000, 128), nn.Linear(128, 2))
assert replace_embeddings(model).parameters_after < 20_000 * 128
assert model(torch.tensor([[1, 2]])).shape == (1, 2, 2)
PYTHON
echo "The wheel of $size bytes works on its own."

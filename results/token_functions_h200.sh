#!/bin/bash
# All runs of token functions on one GPU, one after another; a run that has its JSON is not done again. DATA is the
# folder of wiki78m. About three hours of an H200 in all: 42 runs of the LSTM, 36 of the Transformer-XL.
#     DATA=/path/to/wiki78m results/token_functions_h200.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
for family in h200-lstm h200-txl; do
  "$python" results/run_token_functions.py "$family" --data "$DATA" --device cuda --times
done
for family in h200-lstm h200-txl; do
  "$python" results/run_token_functions.py "$family" --data "$DATA" --device cuda
done
.venv/bin/torchdefine search txl/budget/projective-128 --data "$DATA" --out runs/search-wiki78m --train.steps 1800 --trials 32

#!/bin/bash
# All runs of token functions on one GPU, one after another; a run that has its JSON is not done again. DATA is the
# folder of wiki78m. There are 42 runs of 8,930 steps of the LSTM and 42 of 8,000 steps of the Transformer-XL; at the
# 12.4 and 16.3 ms that results/benchmarks has for such steps they train for about three hours. Nothing of it has run yet.
#     DATA=/path/to/wiki78m PYTHON=.venv/bin/python results/token_functions_h200.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
for family in h200-lstm h200-txl; do
  "$python" results/run_token_functions.py "$family" --data "$DATA" --device cuda --times
done
for family in h200-lstm h200-txl; do
  "$python" results/run_token_functions.py "$family" --data "$DATA" --device cuda
done
"$python" -m torchdefine search txl/budget/projective-128 --data "$DATA" --out runs/search-wiki78m --trials 32 \
  --train.steps 1800

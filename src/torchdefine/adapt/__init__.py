"""A drop-in for models that exist: their tables replaced, fitted and distilled."""

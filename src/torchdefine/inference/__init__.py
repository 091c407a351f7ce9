"""Programs that run without torchdefine."""

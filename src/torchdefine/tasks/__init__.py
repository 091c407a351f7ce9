"""What a model is trained to do: one folder each."""

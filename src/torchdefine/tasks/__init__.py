"""What a model is trained to do: one folder each."""

DEFAULT = "language"
"""The task of a recipe that names none."""

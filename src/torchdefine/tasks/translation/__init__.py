"""Translators: what is particular to them."""

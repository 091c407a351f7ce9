"""Language models: what is particular to them."""

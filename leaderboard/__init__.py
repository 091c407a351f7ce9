"""Ways of packing token tables, measured at equal bytes: one file a method, one file a table, one command."""

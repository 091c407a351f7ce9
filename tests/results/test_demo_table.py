"""The table of docs/demo.md."""

from importlib import import_module

tables = import_module("demo_table")


def test_the_table_has_a_line_for_each_row_and_a_sentence_for_each_line() -> None:
    shared = {"test_perplexity": 100.0, "valid_perplexity": 110.0, "ms_per_look_up": 0.5}
    rows = [
        {"model": "plain", "parameters": 2_000_000, "table_bytes": 4_000_000, "ms_per_step": 30.4, **shared},
        {"model": "plain, packed", "packed_from": "plain", "table_bytes": 250_000, **shared},
    ]
    lines = tables.demo_table(rows)
    assert lines[0].startswith("| model | parameters, M | table, MB |")
    assert lines[2:5] == [
        "| plain | 2.00 | 4.00 | 110.0 | 100.0 | 30 | 0.50 |",
        "| plain, packed | – | 0.25 | 110.0 | 100.0 | – | 0.50 |",
        "",
    ]
    assert lines[6].startswith("- plain, packed: a table 16.0 times smaller")

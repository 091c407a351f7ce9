from importlib import import_module

tables = import_module("click_table")


def test_a_line_for_each_model_with_the_mean_and_range_of_its_seeds() -> None:
    found = {"DeFINE": {"rows": 32_768, "bytes": 1_086_768, "rate": 2.0, "AUC": 0.6877}}
    first = {"commit": "0123456789abcdef", "results": found}
    second = {**first, "results": {"DeFINE": {**found["DeFINE"], "AUC": 0.6897}}}
    assert tables.click_table([first, second]).splitlines()[2:] == [
        "| DeFINE | 32,768 | 1,086,768 | 0.689 (0.688–0.690) |",
        "",
        "2 seeds, mean and range; commit 0123456789ab.",
    ]
    assert "| 0.688 |" in tables.click_table([first])

"""The page of the site that lists the recipes, from the recipes themselves."""

from __future__ import annotations

from collections.abc import Iterator

from torchdefine.cli.recipes import FAMILIES, PUBLISHED
from torchdefine.recipe import load_recipe, recipes_below
from torchdefine.task import Recipe

LEAD = """# Recipes

A recipe is a YAML file with every setting of a training run. These come with the package:

```
torchdefine recipes demo                             # one family
torchdefine recipes table1a/r3                       # all settings of one recipe, as a file to change
torchdefine params table1a/r3                        # its parameters beside the published ones
torchdefine train demo/adaptive-define --out runs/a --optim.lr 0.002
```

The last column says where a recipe comes from. One with numbers has the settings of a row of a paper. The numbers are
those of the paper: parameters, perplexities of the validation and the test text, BLEU. The others are our own.
[The paper, row by row](paper.md) has our numbers beside the published ones. [Training](training.md) explains
the settings.
"""


def recipes_page() -> str:
    return "\n".join([LEAD, *(line for family, trains in FAMILIES.items() for line in _family(family, trains))])


def _family(family: str, trains: str) -> Iterator[str]:
    recipes = [load_recipe(name) for name in recipes_below(family)]
    yield f"## {family}"
    yield ""
    yield f"{trains[0].upper()}{trains[1:]}."
    yield ""
    yield "| recipe | what it trains | published |"
    yield "|---|---|---|"
    yield from (f"| `{recipe.name}` | {recipe.description} | {_published(recipe)} |" for recipe in recipes)
    yield ""


def _published(recipe: Recipe) -> str:
    """The numbers of a paper's row, or the row that it is a variant of."""
    if recipe.published:
        found = {shown: recipe.published.get(name) for name, shown in PUBLISHED.items()}
        return ", ".join(f"{value:g} {name}" for name, value in found.items() if value is not None)
    return f"variant of `{recipe.varies}`" if recipe.varies else "our own"

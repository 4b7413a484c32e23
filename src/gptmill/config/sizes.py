"""Model sizes: named architectures, in TOML files that set [model] alone; fields they leave out have defaults."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.model import ModelConfig
from gptmill.config.recipes import load_recipe, read_title
from gptmill.config.schema import build_config, list_values

SHIPPED_SIZES = Path(str(resources.files("gptmill.config"))) / "sizes"
NOT_ARCHITECTURE = ("dropout",)  # a training option: a size keeps the recipe's


def list_sizes() -> dict[str, str]:
    """Titles of the shipped sizes by name."""
    return {path.stem: read_title(path) for path in sorted(SHIPPED_SIZES.glob("*.toml"))}


def load_size(name: str) -> dict[str, Any]:
    """All values of the architecture, defaults included, so that nothing of a recipe's model remains."""
    sizes = list_sizes()
    if name not in sizes:
        raise UserError(f"unknown size {name!r}{suggest(name, sizes)}; the sizes are {', '.join(sizes)}")
    model = build_config(ModelConfig, load_recipe(str(SHIPPED_SIZES / f"{name}.toml")))
    return {field: value for field, value in list_values(model).items() if field not in NOT_ARCHITECTURE}

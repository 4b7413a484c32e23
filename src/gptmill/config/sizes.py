"""Model sizes: named architectures, in TOML files; fields of [model] that they leave out have defaults.

A small one also has the batch sizes and the like that fit it, for a run without a recipe.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.model import ModelConfig
from gptmill.config.recipes import load_recipe, read_title
from gptmill.config.schema import build_config, list_fields, list_values

SHIPPED_SIZES = Path(str(resources.files("gptmill.config"))) / "sizes"
NOT_ARCHITECTURE = ("dropout",)  # a training option: a size keeps the recipe's


def list_sizes() -> dict[str, str]:
    """Titles of the shipped sizes by name."""
    return {path.stem: read_title(path) for path in sorted(SHIPPED_SIZES.glob("*.toml"), key=lambda path: path.stem)}


def load_size(name: str) -> dict[str, Any]:
    """All values of the architecture, defaults included, so that nothing of a recipe's model remains."""
    model = build_config(ModelConfig, _load(name))
    return {field: value for field, value in list_values(model).items() if field not in NOT_ARCHITECTURE}


def load_size_training(name: str) -> dict[str, Any]:
    """The values outside [model] that a size has of its own; none for most."""
    model_fields = {field.name for field in list_fields(ModelConfig)}
    return {field: value for field, value in _load(name).items() if field not in model_fields}


def _load(name: str) -> dict[str, Any]:
    sizes = list_sizes()
    if name not in sizes:
        raise UserError(f"unknown size {name!r}{suggest(name, sizes)}; the sizes are {', '.join(sizes)}")
    return load_recipe(str(SHIPPED_SIZES / f"{name}.toml"))

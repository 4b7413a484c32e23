"""Sizes: models by name, in TOML files that set nothing but [model], and leave the rest of it at the defaults."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.model import ModelConfig
from gptmill.config.recipes import load_recipe, read_title
from gptmill.config.schema import build_config, list_values

SHIPPED_SIZES = Path(str(resources.files("gptmill.config"))) / "sizes"
KEPT = ("dropout",)  # how a model is trained, not what it is


def list_sizes() -> dict[str, str]:
    """Sizes by name, each with the first line of its comment."""
    return {path.stem: read_title(path) for path in sorted(SHIPPED_SIZES.glob("*.toml"))}


def load_size(name: str) -> dict[str, Any]:
    """Every value of the model but its dropout: of another model's parts, none must be left over above a recipe."""
    sizes = list_sizes()
    if name not in sizes:
        raise UserError(f"no size is called {name!r}{suggest(name, sizes)}; the sizes are {', '.join(sizes)}")
    model = build_config(ModelConfig, load_recipe(str(SHIPPED_SIZES / f"{name}.toml")))
    return {field: value for field, value in list_values(model).items() if field not in KEPT}

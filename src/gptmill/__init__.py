"""gptmill: text in, trained GPT out. These names are the public API; docs/python.md explains them.

They are imported when they are first used, so that `import gptmill` takes no time and needs no torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, whose import takes a command's first milliseconds
if TYPE_CHECKING:
    from typing import Any

    from gptmill.api.budget import plan_within_budget, train_within_budget
    from gptmill.api.compression import Compressed, compress
    from gptmill.api.configuration import make_config
    from gptmill.api.corpus import Corpus, open_corpus, prepare
    from gptmill.api.doctor import doctor
    from gptmill.api.evaluation import evaluate
    from gptmill.api.exporting import export_model
    from gptmill.api.importing import import_model
    from gptmill.api.planning import plan
    from gptmill.api.registration import register
    from gptmill.api.reporting import report
    from gptmill.api.run import Run, load, open_run
    from gptmill.api.tensorboard_server import open_tensorboard
    from gptmill.api.training import resume, train
    from gptmill.config.errors import ConfigError, UserError
    from gptmill.config.run import ModelConfig, OptimizerConfig, RunConfig
    from gptmill.data.batches.batch import Batch
    from gptmill.experiments.doctor.finding import Finding
    from gptmill.inference.model import Model
    from gptmill.models.attention import Attention, BlockContext
    from gptmill.models.kv_cache import LayerKVCache
    from gptmill.runs.events import Event
    from gptmill.runs.trackers.protocol import Tracker

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Batch",
    "BlockContext",
    "Compressed",
    "ConfigError",
    "Corpus",
    "Event",
    "Finding",
    "LayerKVCache",
    "Model",
    "ModelConfig",
    "OptimizerConfig",
    "Run",
    "RunConfig",
    "Tracker",
    "UserError",
    "__version__",
    "compress",
    "doctor",
    "evaluate",
    "export_model",
    "import_model",
    "load",
    "make_config",
    "open_corpus",
    "open_run",
    "open_tensorboard",
    "plan",
    "plan_within_budget",
    "prepare",
    "register",
    "report",
    "resume",
    "train",
    "train_within_budget",
]
_MODULES = {
    "api.budget": ("plan_within_budget", "train_within_budget"),
    "api.compression": ("Compressed", "compress"),
    "api.configuration": ("make_config",),
    "api.corpus": ("Corpus", "open_corpus", "prepare"),
    "api.doctor": ("doctor",),
    "api.evaluation": ("evaluate",),
    "api.importing": ("import_model",),
    "api.exporting": ("export_model",),
    "api.planning": ("plan",),
    "api.registration": ("register",),
    "api.reporting": ("report",),
    "api.run": ("Run", "load", "open_run"),
    "api.tensorboard_server": ("open_tensorboard",),
    "api.training": ("resume", "train"),
    "config.errors": ("ConfigError", "UserError"),
    "config.run": ("ModelConfig", "OptimizerConfig", "RunConfig"),
    "data.batches.batch": ("Batch",),
    "experiments.doctor.finding": ("Finding",),
    "inference.model": ("Model",),
    "models.attention": ("Attention", "BlockContext"),
    "models.kv_cache": ("LayerKVCache",),
    "runs.events": ("Event",),
    "runs.trackers.protocol": ("Tracker",),
}


if not TYPE_CHECKING:  # a type checker would take it for a promise that every name exists

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"gptmill.{module}"), name)
        raise AttributeError(f"module 'gptmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""What a run says of itself."""

from __future__ import annotations

import pytest

from gptmill.config.run import CompileMode, MachineConfig
from gptmill.training.session import describe_compiling


@pytest.mark.parametrize(
    ("is_compiled", "mode", "said"),
    [
        (False, "default", ""),
        (True, "default", "compiled"),
        (True, "max-autotune", "compiled (max-autotune)"),
        (False, "max-autotune", "not compiled: compile_mode max-autotune does nothing without --compile"),
    ],
)
def test_it_says_whether_and_how_it_is_compiled(is_compiled: bool, mode: CompileMode, said: str) -> None:
    assert describe_compiling(MachineConfig(compile=is_compiled, compile_mode=mode)) == said

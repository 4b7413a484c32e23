"""Options of gptmill sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.plugins import PluginConfig
from gptmill.config.requests import LoadingOptions
from gptmill.config.trust import TrustOptions

STOP_SEPARATOR = "\0"  # between several texts in `SampleRequest.stop`; no command line can hold it


@dataclass(frozen=True)
class SampleRequest:
    """Sampling"""

    prompt: str = ""
    """Prompt; empty starts a new document, - reads standard input."""
    prompt_file: str | None = None
    """File of prompts: one per line, or .jsonl with an object per line and the prompt in its field prompt."""
    interactive: bool = False
    """Ask for prompts until Ctrl-D; Ctrl-C stops a text."""
    num_samples: int = 1
    """Number of samples of each prompt."""
    batch_size: int = 32
    """Maximum number of samples to generate at a time; does not affect them."""
    max_new_tokens: int = 256
    """Maximum number of tokens to generate per sample."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = None
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    min_p: float | None = None
    """Sample only from tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the text so far become less likely (CTRL's penalty)."""
    stop: str | None = None
    """Stop before this text; repeat the flag for several texts."""
    seed: int = 42
    """Random seed; sample i uses seed + i."""
    context: Literal["crop", "half", "rolling"] = "crop"
    """Beyond the context: crop to its last tokens (slow), drop its older half, or rolling: roll the KV cache (RoPE)."""
    json: bool = False
    """Print a JSON object per sample: prompt, text, tokens, log_probs (of the model itself), finish_reason, seed."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of weights and computation; auto: bf16 on GPUs that have it, fp32 elsewhere."""
    compile: bool | None = None
    """Compile the model first; it takes a while (default: if the samples are many and long, on a GPU)."""
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    trusting: TrustOptions = field(default_factory=TrustOptions)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts to stop at."""
        return () if self.stop is None else tuple(self.stop.split(STOP_SEPARATOR))

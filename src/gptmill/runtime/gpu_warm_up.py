"""Loads a GPU's libraries ahead of use: its first matrix product and its first attention take seconds."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch
import torch.nn.functional as F

from gptmill.runtime.precision import choose_precision, make_autocast

TOKENS, HEADS, HEAD_WIDTH, WIDTH = 64, 2, 64, 128


def start_warm_up(device: torch.device) -> None:
    """Runs a tiny forward pass in a thread, while the host reads weights and data. Other devices need none."""
    if device.type == "cuda":
        threading.Thread(target=_warm_up, args=(device,), name="GPU warm-up").start()


def _warm_up(device: torch.device) -> None:
    # What fails here, fails again where it is needed, and is reported there.
    with suppress(RuntimeError), torch.no_grad(), make_autocast(choose_precision("auto", device), device):
        compute_once(device)
        torch.cuda.synchronize(device)


def compute_once(device: torch.device) -> None:
    """The operations of a language model, on the smallest shapes that use the same kernels."""
    weight_CC = torch.zeros(WIDTH, WIDTH, device=device)
    tokens_T = torch.arange(TOKENS, device=device)
    x_TC = F.layer_norm(weight_CC[tokens_T], (WIDTH,))
    q_1HTD = F.linear(x_TC, weight_CC, weight_CC[0]).view(1, TOKENS, HEADS, HEAD_WIDTH).transpose(1, 2)
    visible_TT = tokens_T[:, None] >= tokens_T
    attended_1HTD = F.scaled_dot_product_attention(q_1HTD, q_1HTD, q_1HTD, is_causal=True)
    attended_1HTD = F.scaled_dot_product_attention(attended_1HTD, q_1HTD, q_1HTD, attn_mask=visible_TT[None, None])
    x_TC = x_TC + F.gelu(attended_1HTD.transpose(1, 2).reshape(TOKENS, WIDTH), approximate="tanh")
    logits_TV = F.linear(x_TC, weight_CC)
    logits_TV.log_softmax(dim=1, dtype=torch.float32).gather(1, tokens_T[:, None])
    logits_TV.argmax(dim=1)

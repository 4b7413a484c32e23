"""gptmill train --gpus: one process per GPU of this machine, started and watched by torchrun's own launcher."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptmill.config.errors import UserError
from gptmill.runtime.ranks import has_ranks

# torchrun kills the ranks that have not ended so long after a signal; a large checkpoint takes more than its 30 s.
SHUTDOWN_SECONDS = 300


def count_gpus() -> int:
    """The GPUs that this process may use: CUDA_VISIBLE_DEVICES counts."""
    return torch.cuda.device_count()


def choose_num_ranks(gpus: str, device: str) -> int:
    """The number of processes to start; raises UserError for one that this machine has no GPUs for."""
    if has_ranks():
        raise UserError(f"--gpus {gpus}: torchrun has started the ranks already; leave out --gpus, or torchrun")
    available = count_gpus()
    if device == "cpu" or not available:
        why = "--device cpu uses none" if device == "cpu" else "this machine has none that torch can use"
        raise UserError(
            f"--gpus {gpus} starts one process per NVIDIA or AMD GPU, but {why}; leave it out to train in one process"
        )
    if gpus == "all":
        return available
    if not gpus.isdecimal() or not 1 <= int(gpus) <= available:
        raise UserError(f"--gpus {gpus}: give all, or a number from 1 to {available}, the GPUs of this machine")
    return int(gpus)


def launch_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Runs `gptmill ARGUMENTS` as ranks, as torchrun --standalone does; returns the exit code of the first to fail."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    # A failed rank has said why; the launcher's own log would repeat it in forty lines.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "gptmill", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0

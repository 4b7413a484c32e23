"""How ranks find each other: through the store that torchrun, or rank 0, offers at one address.

torchrun keeps its store when it restarts the ranks, with all that earlier ones have written. Only those that have just
started may meet: each shows a token of its own, and rank 0 repeats the tokens that it has seen.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json
from gptmill.runtime.rank_store import RankStore, is_agents_store

JOIN_SECONDS = 600.0  # ranks of a cluster start minutes apart
POLL_SECONDS = 0.02
MAX_NAMED_RANKS = 8


def connect(rank: int, size: int) -> RankStore:
    """The store of all ranks, once they are all there; raises UserError that names the absent ones."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    address, deadline = f"{host}:{port}", time.monotonic() + JOIN_SECONDS
    is_host = rank == 0 and not is_agents_store()
    if not is_host:
        _await_host(host, port, deadline)
    timeout = timedelta(seconds=JOIN_SECONDS)
    try:
        store = TCPStore(host, port, size, is_host, timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {rank} cannot open the store of all ranks at {address}: {reason}") from None
    return meet(store, rank, size, deadline, address)


def meet(store: Store, rank: int, size: int, deadline: float, address: str = "") -> RankStore:
    """Waits for the others, until the deadline on time.monotonic(); returns a part of the store that is theirs."""
    hall, token = PrefixStore("gptmill", store), uuid.uuid4().hex
    hall.set(f"hello/{rank}", token)
    while True:
        if rank == 0:
            hall.set("welcome", json.dumps([token, _read_tokens(hall, size)]))
        common = _find_common_token(hall, rank, token)
        if common:
            hall.set(f"{common}/present/{rank}", "")
            if hall.check([f"{common}/present/{other}" for other in range(size)]):
                return RankStore(PrefixStore(common, hall), rank, size, address)
        if time.monotonic() > deadline:
            raise UserError(_describe_absent(hall, size, common))
        time.sleep(POLL_SECONDS * max(1.0, size / 100))  # a thousand ranks ask one store


def _read_tokens(hall: Store, size: int) -> list[str]:
    """The token of each rank; empty for one that has not shown it, and maybe an old one."""
    keys = [f"hello/{rank}" for rank in range(size)]
    if hall.check(keys):
        return [bytes(token).decode() for token in hall.multi_get(keys)]
    return [bytes(hall.get(key)).decode() if hall.check([key]) else "" for key in keys]


def _find_common_token(hall: Store, rank: int, token: str) -> str:
    """The token of rank 0, if that has seen this rank's; empty if it has not."""
    with suppress(ValueError, IndexError):
        if hall.check(["welcome"]):
            common, seen = parse_json(hall.get("welcome"))
            return str(common) if seen[rank] == token else ""
    return ""


def _describe_absent(hall: Store, size: int, common: str) -> str:
    prefix = f"{common}/present" if common else "hello"
    absent = [str(rank) for rank in range(size) if not hall.check([f"{prefix}/{rank}"])] or ["0"]
    named = ", ".join(absent[:MAX_NAMED_RANKS]) + (", …" if len(absent) > MAX_NAMED_RANKS else "")
    return (
        f"{len(absent)} of {size} ranks did not start within {JOIN_SECONDS:.0f} s: {named}; see what their machines "
        f"report"
    )


def _await_host(host: str, port: int, deadline: float) -> None:
    """In Python, since Ctrl-C could not end torch's own wait."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank 0 cannot be reached at {host}:{port} ({error.strerror or error}); check that it runs, "
                    f"MASTER_ADDR and MASTER_PORT, and the firewall"
                ) from None
            time.sleep(POLL_SECONDS)
        else:
            return

"""Two hosts on one machine: network namespaces with a cable between them. They vanish with the processes in them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "cable0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LIFETIME_SECONDS = "900"  # of a host that a killed test leaves behind
COMMAND_SECONDS = 20


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, held open by a process that sleeps."""

    pid: int
    address: str

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host; no rights are needed where users may make namespaces."""
        return ["nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.wrap(command), check=True, capture_output=True, timeout=COMMAND_SECONDS)

    def start(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a program on this host; its output is one text."""
        return subprocess.Popen(
            self.wrap(command),
            cwd=folder,
            env={**environment, "GLOO_SOCKET_IFNAME": INTERFACE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def plug(self, *, is_in: bool) -> None:
        """Pulls the cable, or puts it back; what was on its way is sent again, as TCP does."""
        self.run("ip", "link", "set", INTERFACE, "up" if is_in else "down")


@contextmanager
def open_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; raises OSError or SubprocessError where that is not allowed."""
    with ExitStack() as stack:
        first = Host(_hold(stack, ["unshare", "--map-root-user", "--net"]), ADDRESSES[0])
        second = Host(_hold(stack, first.wrap(["unshare", "--net"])), ADDRESSES[1])
        first.run(
            *f"ip link add name {INTERFACE} type veth peer name {INTERFACE} netns {second.pid}".split(),
        )
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                host.run("ip", "link", "set", interface, "up")
        yield first, second


def _hold(stack: ExitStack, enter: Sequence[str]) -> int:
    """Starts a process that sleeps in a namespace of its own, and returns its number once it is there."""
    own = Path("/proc/self/ns/net").readlink()
    process = subprocess.Popen([*enter, "sleep", LIFETIME_SECONDS])
    stack.callback(process.wait, COMMAND_SECONDS)
    stack.callback(process.kill)
    deadline = time.monotonic() + COMMAND_SECONDS
    while Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip() != "sleep":
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"{enter[0]} ended: network namespaces are not permitted here")
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}/ns/net").readlink() != own
    return process.pid

"""Executors: this process, a process pool or a Dask cluster. Results are returned in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gptmill import __version__
from gptmill.config.errors import UserError
from gptmill.config.plugins import load_plugins

Work = TypeVar("Work")
Result = TypeVar("Result")
IN_FLIGHT_PER_WORKER = 3  # one running, one queued, one finished and waiting for earlier results


class InlineExecutor(Executor):
    """Runs each call immediately in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class WorkerPool(ProcessPoolExecutor):
    """A process pool whose workers ignore Ctrl-C, which the parent handles."""

    runs_script = True
    """Whether a new process runs the user's script first, as spawned ones usually do."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        with _postponed_interrupt(), nullcontext() if self.runs_script else _hidden_script():
            return super().submit(function, *arguments, **options)


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Workers:
    """An executor and its number of workers."""

    executor: Executor
    count: int


@contextmanager
def open_executor(
    processes: int, cluster: str | None, load: Callable[[], None], plugins: str | None = None
) -> Iterator[Workers]:
    """Opens an executor; calls `load` in every new process right away, so that start-up overlaps with other work.

    New processes load the plug-ins first, whose parts they will receive by name.
    """
    if cluster is not None:
        with _open_cluster(cluster, plugins) as workers:
            yield workers
    elif processes == 1:
        yield Workers(InlineExecutor(), 1)
    else:
        # Spawned, not forked: the parent may have threads and locks.
        context = multiprocessing.get_context("spawn")
        executor = WorkerPool(processes, mp_context=context, initializer=_become_worker, initargs=(plugins,))
        executor.runs_script = _has_main_guard()
        try:
            for _ in range(processes):
                executor.submit(load)
            yield Workers(executor, processes)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def map_in_order(
    function: Callable[[Work], Result], work: Iterable[Work], workers: Workers
) -> Iterator[tuple[Work, Result]]:
    """Yields each item of work with its result, in order; limits the number of items in flight."""
    pending: deque[tuple[Work, Future[Result]]] = deque()
    try:
        for item in work:
            pending.append((item, workers.executor.submit(function, item)))
            if len(pending) > IN_FLIGHT_PER_WORKER * workers.count or isinstance(workers.executor, InlineExecutor):
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably because memory ran out; run the same command again with fewer "
            "--processes to resume"
        ) from None
    finally:
        for _, future in pending:
            future.cancel()


def _has_main_guard() -> bool:
    """Whether the user's script says what only the first process is to do: others run it too, for what it defines.

    One that calls `prepare` without a guard would prepare the corpus once more, in every process.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return path is None or "__main__" in Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


@contextmanager
def _postponed_interrupt() -> Iterator[None]:
    """Holds back a Ctrl-C while a process may be started, until it has all that it needs to start.

    The signal is blocked, which a new process inherits: it ignores Ctrl-C from its first instruction on. Other threads
    of this process, as of a BLAS library, still accept it, and Python would raise it here, in the main thread; so it is
    noted and sent again.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    is_handled_here = callable(handler) and threading.current_thread() is threading.main_thread()
    if is_handled_here:
        signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if is_handled_here:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if noted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _hidden_script() -> Iterator[None]:
    """Starts processes as if there were no script."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _become_worker(plugins: str | None) -> None:
    """Ignores Ctrl-C, which the parent handles, and exits when the parent does, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    load_plugins(plugins)


@contextmanager
def _open_cluster(address: str, plugins: str | None) -> Iterator[Workers]:
    try:
        from distributed import Client
    except ImportError:
        raise UserError("--cluster needs Dask; install it with: pip install 'gptmill[cluster]'") from None
    try:
        client = Client(address, timeout="5s", set_as_default=False)
    except Exception as error:  # of any kind: names, certificates, versions
        raise UserError(
            f"no Dask scheduler answers at {address} ({error}); start one with: dask scheduler, and name its address"
        ) from None
    with _explained_failures(address), client:
        count = sum(client.nthreads().values())
        if count == 0:
            raise UserError(f"the Dask scheduler at {address} has no workers; start some with: dask worker {address}")
        _load_on_workers(client, plugins)
        yield Workers(client.get_executor(pure=False), count)


def _load_on_workers(client: Any, plugins: str | None) -> None:
    """Raises UserError for workers without this version: what they encode would differ, or fail anywhere."""
    advice = f"install gptmill {__version__} with the same extras on all workers"
    try:
        versions: dict[str, str] = client.run(_load_on_worker, plugins)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(f"a Dask worker cannot load this gptmill ({error}); {advice}") from None
    for worker, version in versions.items():
        if version != __version__:
            raise UserError(f"the Dask worker {worker} has gptmill {version}; {advice}")


def _load_on_worker(plugins: str | None) -> str:
    load_plugins(plugins)
    return __version__


@contextmanager
def _explained_failures(address: str) -> Iterator[None]:
    """Makes a sentence of what Dask raises by itself, and leaves alone what its work raises."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        if library not in ("dask", "distributed", "tornado") and not isinstance(error, CancelledError):
            raise
        reason, advice = " ".join(str(error).split()), "see the logs of its scheduler and workers"
        if worker := getattr(error, "last_worker", None):  # KilledWorker, whose own text is about Dask's insides
            reason = f"every worker that took a certain part died, the last one at {worker.address}"
            advice = "give its workers more memory, which probably ran out"
        raise UserError(
            f"the Dask cluster at {address} failed: {reason or type(error).__name__}; {advice}, and run the same "
            f"command again to resume"
        ) from None

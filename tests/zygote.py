"""Starts Python programs as forks of a process that has imported everything: in a tenth of a second, not in seconds.

Such a program is a process of its own, with its own folder, environment, streams and signals. The zygote reads a JSON
object per request and gets the program's streams with it; it reports the program's process number, then its exit
status. What a program itself starts with this interpreter, by `subprocess` or as a worker of `multiprocessing`, is
forked from it as well, as its real child.

The workers of pytest-xdist are forked too, and share one zygote: `zygote.py ADDRESS …` stands in for the interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import multiprocessing.util
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORTED = ("gptmill.cli", "gptmill.api", "gptmill.training.loop", "torch._dynamo")
ALSO_IMPORTED = ("numpy.ma", "rich._emoji_codes", "encodings.idna")  # by every training, sooner or later
STREAMS = (0, 1, 2)
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
LONGEST_WORKER_SECONDS = 6 * 3600.0
SPAWN = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
SHOW_STACKS = signal.SIGXCPU  # which nothing else sends


class Process:
    """A program that runs: what `subprocess.Popen` offers for text, for a process that is not this one's child."""

    def __init__(self, arguments: tuple[str, ...], news: socket.socket, stdout: int | None, stderr: int | None) -> None:
        self.args = arguments
        self.stdout, self.stderr = (
            end if end is None else os.fdopen(end, encoding="utf-8") for end in (stdout, stderr)
        )
        self._news = news
        self._lines = news.makefile()
        if not select.select([news], [], [], Zygote.LONGEST_SECONDS)[0]:
            raise TimeoutError(f"{arguments}: not forked within {Zygote.LONGEST_SECONDS:.0f} s")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for the signal that ended the program; None while it runs."""
        if self.returncode is None and select.select([self._news], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError for a program that takes longer, and ends it once it has shown where it is."""
        seconds = Zygote.LONGEST_SECONDS if timeout is None else timeout
        if self.returncode is None:
            if not select.select([self._news], [], [], seconds)[0]:
                self.send_signal(SHOW_STACKS)
                time.sleep(1)
                self.kill()
                self._read_status()
                raise TimeoutError(f"{self.args} took more than {seconds:.0f} s")
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of the output and of the errors, once the program has ended. A TimeoutError repeats it."""
        said: dict[str, str] = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                said[name] = stream.read()

        streams = {name: getattr(self, name) for name in said if getattr(self, name) and not getattr(self, name).closed}
        readers = [threading.Thread(target=read, args=item, daemon=True) for item in streams.items()]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except TimeoutError as error:
            for reader in readers:
                reader.join(1)
            raise TimeoutError(f"{error}\n{said['stdout']}\n{said['stderr']}") from None
        for reader in readers:
            reader.join(Zygote.LONGEST_OUTPUT_SECONDS)
            if reader.is_alive():
                raise TimeoutError(f"{self.args} has ended, but something that it started keeps its output open")
        return said["stdout"], said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_status(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(int(self._lines.readline()))
        self._lines.close()
        self._news.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
        self.communicate()


class Zygote:
    """The process that forks, as the tests see it."""

    LONGEST_SECONDS = 300.0  # less than the limit of a test, whose message says less
    LONGEST_OUTPUT_SECONDS = 60.0

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = requests
        self._process = process

    @classmethod
    def connect(cls, address: str) -> Zygote:
        """One that runs already."""
        requests = socket.socket(socket.AF_UNIX)
        requests.connect(address)
        return cls(requests)

    @classmethod
    def open(cls, environment: Mapping[str, str], address: str) -> Zygote:
        """A new one, which others can connect to until it is closed."""
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            descriptors = (theirs.fileno(), listener.fileno())
            process = subprocess.Popen(
                [sys.executable, __file__, *map(str, descriptors)],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        return cls(ours, process)

    def start(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.STDOUT,
        leads_session: bool = False,
        takes_terminal: bool = False,
        spare_memory_bytes: int | None = None,
        forks_others: bool = True,
    ) -> Process:
        """Runs `python ARGUMENTS` in a folder: `-m gptmill …`, `-c CODE …` or a script.

        A program that takes its terminal leads a session of its own, with standard input as its terminal. One with
        spare memory is refused more address space than that beyond what its imports take. One that does not fork
        others starts new interpreters, as programs do.
        """
        words = tuple(map(str, arguments))
        request = {
            "arguments": words,
            "folder": str(folder),
            "environment": dict(environment),
            "leads_session": leads_session or takes_terminal,
            "takes_terminal": takes_terminal,
            "spare_memory_bytes": spare_memory_bytes,
            "forks_others": forks_others,
        }
        ours, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("r+b") as nothing:
            out_read, out_write = os.pipe() if stdout == subprocess.PIPE else (None, None)
            err_read, err_write = os.pipe() if stderr == subprocess.PIPE else (None, None)
            output = _find_descriptor(stdout, out_write, nothing)
            error = output if stderr == subprocess.STDOUT else _find_descriptor(stderr, err_write, nothing)
            sent = [theirs.fileno(), _find_descriptor(stdin, None, nothing), output, error]
            socket.send_fds(self._socket, [b"\n"], sent)
            self._socket.sendall(f"{json.dumps(request)}\n".encode())
            for end in (out_write, err_write):
                if end is not None:
                    os.close(end)
        return Process(words, ours, out_read, err_read)

    def run(
        self, arguments: Sequence[str | Path], folder: Path, environment: Mapping[str, str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; its output and its errors are kept apart."""
        process = self.start(arguments, folder, environment, **{"stderr": subprocess.PIPE, **options})
        output, errors = process.communicate()
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def close(self) -> None:
        self._socket.close()
        if self._process is None:
            return
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def _find_descriptor(stream: int | IO[Any], pipe: int | None, nothing: IO[bytes]) -> int:
    if pipe is not None:
        return pipe
    if stream == subprocess.DEVNULL:
        return nothing.fileno()
    return stream if isinstance(stream, int) else stream.fileno()


def serve(owner: socket.socket, listener: socket.socket) -> None:
    """Forks for every request, and reports how programs end, until its owner goes away."""
    import_programs()
    clients = {owner.fileno(): owner}
    running: dict[int, tuple[int, int]] = {}  # by the descriptor that tells when a program ends: its number, its news
    while True:
        ready = select.select([listener.fileno(), *clients, *running], [], [])[0]
        for ended in running.keys() & ready:
            child, news = running.pop(ended)
            report(news, os.waitpid(child, 0)[1])
            os.close(ended)
            os.close(news)
        if listener.fileno() in ready:
            client = listener.accept()[0]
            clients[client.fileno()] = client
        for asking in clients.keys() & ready:
            descriptors, line = receive(clients[asking])
            if not line:
                clients.pop(asking).close()
                continue
            news, *streams = descriptors
            child = os.fork()
            if child == 0:
                news_of_others = [each for _, each in running.values()]
                for descriptor in (listener.detach(), news, *running, *news_of_others, *clients):
                    os.close(descriptor)
                become_program(json.loads(line), streams)
            report(news, child)
            running[os.pidfd_open(child)] = child, news
            for descriptor in streams:
                os.close(descriptor)
        if owner.fileno() < 0:
            return


def import_programs() -> None:
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = fork_worker  # type: ignore[attr-defined]
    for name in (*IMPORTED, *ALSO_IMPORTED):
        import_all(name)
    sys.modules["gptmill.runs.code_fingerprint"].make_code_fingerprint()
    sys.modules["gptmill.config.schema"].list_fields(sys.modules["gptmill.config.run"].RunConfig)
    sys.modules["gptmill.data.tokenizers"].TOKENIZERS["gpt2"]()
    gc.freeze()  # what a child does not touch need not be copied
    forget_exits_of_imports()
    collapse_pages()


def collapse_pages() -> None:
    """Has the kernel hold the memory in huge pages: a fork copies an entry per page. Kernels before 6.1 refuse."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *names = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access.startswith("rw") and names in ([], ["[heap]"]) and last > first:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def import_all(name: str) -> None:
    """A module, or a package with the modules right inside it."""
    module = importlib.import_module(name)
    if name.startswith("gptmill."):
        for inside in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{name}.{inside.name}")


def receive(requests: socket.socket) -> tuple[list[int], bytes]:
    """The descriptors and the line of a request; an empty line once there are no more."""
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
    line = b""
    while not line.endswith(b"\n"):
        received = requests.recv(65536)
        if not received:
            return descriptors, b""
        line += received
    return descriptors, line


def report(news: int, number: int) -> None:
    with suppress(OSError):  # nobody may be waiting any more
        os.write(news, f"{number}\n".encode())


def forget_exits_of_imports() -> None:
    """Spares every child what torch does when Python ends: it unloads operators, and prints its compile times with a
    library that it imports for that. This takes longer than most commands."""
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def become_program(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    if request["leads_session"]:
        os.setsid()
    for stream, descriptor in zip(STREAMS, streams, strict=True):
        os.dup2(descriptor, stream)
    for descriptor in set(streams) - set(STREAMS):
        os.close(descriptor)
    if request["takes_terminal"]:
        take_terminal()
    if request["spare_memory_bytes"] is not None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + request["spare_memory_bytes"],) * 2)
    if not request["forks_others"]:
        start_interpreters()
    os.chdir(request["folder"])
    become(request["arguments"], request["environment"])


def start_interpreters() -> None:
    """Undoes for this process what makes programs fork."""
    for module in list(sys.modules.values()):
        if vars(module).get("Popen") is ForkingPopen:
            vars(module)["Popen"] = ForkingPopen.__base__
    multiprocessing.util.spawnv_passfds = SPAWN  # type: ignore[attr-defined]


def take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Runs this interpreter's command line as if it had just been started, and ends the process."""
    code = 1
    try:
        _start_afresh(environment)
        _run(list(arguments))
        code = 0
    except SystemExit as end:
        code = _read_exit_code(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    # As Python ends, but for freeing the memory of everything imported, which takes longer than most commands.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 120
    os._exit(code & 0xFF)


def _start_afresh(environment: Mapping[str, str]) -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    faulthandler.register(SHOW_STACKS, file=2)
    os.environ.clear()
    os.environ.update(environment)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = _open_stream(descriptor, encoding, errors or ("backslashreplace" if name == "stderr" else "strict"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    vars(sys.modules["gptmill.cli"])["STARTED"] = time.monotonic()
    sys.modules["torch"].set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))


def _open_stream(descriptor: int, encoding: str, errors: str) -> io.TextIOWrapper | None:
    """None for a descriptor that is closed, as in a new interpreter."""
    try:
        binary = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    except OSError:
        return None
    is_direct = descriptor == 2 or bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        binary,
        encoding=encoding,
        errors=errors,
        line_buffering=binary.isatty() or descriptor == 2,
        write_through=is_direct,
    )


def _run(arguments: list[str]) -> None:
    while arguments[0] == "-u":
        arguments.pop(0)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *rest = arguments
    if kind == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(kind).parent))
        sys.argv = arguments
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def _read_exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks what this interpreter is to run, and starts everything else as usual."""

    def __init__(self, args: Any, **options: Any) -> None:
        if isinstance(args, list | tuple) and args[0] == sys.executable:
            environment = dict(options["env"] if options.get("env") is not None else os.environ)
            prepare, kept = options.get("preexec_fn"), {*STREAMS, *options.get("pass_fds", ())}

            def run_here() -> NoReturn:
                if prepare is not None:
                    prepare()
                replace_program([str(word) for word in args[1:]], environment, kept)

            options["preexec_fn"] = run_here
        super().__init__(args, **options)


def fork_worker(_path: bytes, arguments: Sequence[str | bytes], passed: Sequence[int]) -> int:
    """Takes the place of the function by which `multiprocessing` spawns its workers."""
    child = os.fork()
    if child:
        return child
    try:
        words = [os.fsdecode(word) for word in arguments]
        replace_program(words[words.index("-c") :], dict(os.environ), {*STREAMS, *passed})
    finally:
        os._exit(255)


def replace_program(arguments: list[str], environment: Mapping[str, str], kept: set[int]) -> NoReturn:
    """Takes the place of exec: what the parent would do in the end, and its open files, are not the child's."""
    atexit._clear()
    threading._threading_atexits.clear()  # type: ignore[attr-defined]
    _close_all_but(kept)
    become(arguments, environment)


def _close_all_but(kept: set[int]) -> None:
    """The numbers stay taken: objects of the parent may still hold them."""
    with Path(os.devnull).open("r+b") as nothing:
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
            if descriptor not in kept and descriptor != nothing.fileno():
                with suppress(OSError):
                    os.fstat(descriptor)  # the listing's own is closed by now
                    os.dup2(nothing.fileno(), descriptor)


def run_worker(address: str, arguments: Sequence[str]) -> int:
    """Has a worker of pytest-xdist forked, with the streams of this process, and waits until it ends."""
    worker = Zygote.connect(address).start(
        arguments, Path.cwd(), os.environ, stdin=0, stdout=1, stderr=2, forks_others=False
    )
    with Path(os.devnull).open("r+b") as nothing:
        for stream in (0, 1):  # whose other ends wait until all copies are closed
            os.dup2(nothing.fileno(), stream)
    code = worker.wait(timeout=LONGEST_WORKER_SECONDS)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        serve(*(socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]))
    else:
        sys.exit(run_worker(sys.argv[1], sys.argv[2:]))

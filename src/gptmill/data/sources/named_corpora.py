"""Corpora that have a name: where they come from, where they are kept, and how to tell that they are whole."""

from __future__ import annotations

import io
import shutil
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptmill.config.errors import UserError
from gptmill.data.files import find_cache_dir
from gptmill.data.sources.compression import COMPRESSIONS, UnpackedFile, split_compression
from gptmill.data.sources.download import DownloadError, check_disk_space, download_file, hash_content
from gptmill.data.sources.source import SourceFile

PYTHON_STDLIB = "python-stdlib"
# Not what people mean by the library's source: its tests, installed packages, and modules that are only tables.
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"})
HUB = "https://huggingface.co/datasets"
# Fixed revisions, so that a name means the same text next year.
FINEWEB_EDU = f"{HUB}/HuggingFaceFW/fineweb-edu/resolve/fc9850dff5e2d0f8f776efe41b24a1c49556cfc5/sample/10BT"
OPENWEBTEXT = f"{HUB}/Skylion007/openwebtext/resolve/79d93d786212f7344586290adb811d4ae6a1762c/plain_text"
FINEWEB_EDU_BYTES = (
    *(2_152_819_114, 2_152_222_432, 2_151_796_315, 2_152_437_524, 2_152_338_550, 2_152_189_947, 2_152_689_867),
    *(2_150_686_637, 2_151_274_846, 2_151_913_277, 2_152_798_864, 2_152_323_681, 2_152_069_689, 540_632_672),
)
ZIP = ".zip"


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus. What the URL gives is unpacked where it is an archive and `name` is not."""

    name: str
    url: str
    size_bytes: int = 0  # 0 where unknown
    checksum: str | None = None  # of the file, not of the archive; the server's own is used where none is known

    @property
    def stored_name(self) -> str:
        """The name to download under: that of the archive, where it is one."""
        name = self.url.rpartition("/")[2]
        return name if _is_packed(name) and not _is_packed(self.name) else self.name


CORPORA: dict[str, tuple[CorpusFile, ...]] = {
    "tiny-shakespeare": (
        CorpusFile(
            "input.txt",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            1_115_394,
            "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    "enwik8": (
        CorpusFile(
            "enwik8", "https://mattmahoney.net/dc/enwik8.zip", 100_000_000, "md5:a1fa5ffddb56f4953e226637dabbb36a"
        ),
    ),
    "fineweb-edu-10B": tuple(
        CorpusFile(f"{number:03d}_00000.parquet", f"{FINEWEB_EDU}/{number:03d}_00000.parquet", size_bytes)
        for number, size_bytes in enumerate(FINEWEB_EDU_BYTES)
    ),
    "openwebtext": tuple(
        CorpusFile(name, f"{OPENWEBTEXT}/{name}")
        for name in (f"train-{number:05d}-of-00080.parquet" for number in range(80))
    ),
}


def find_corpus(name: str, from_file: str | None) -> list[SourceFile]:
    """The files of a corpus: from the given place, or from the cache, downloaded into it where they are not there."""
    folder = find_cache_dir() / "corpora" / name
    if from_file is None:
        missing = [file.size_bytes for file in CORPORA[name] if not (folder / file.name).is_file()]
        check_disk_space(folder, sum(missing))  # for all of them, before hours go into the first
    found = []
    for file in CORPORA[name]:
        if from_file is not None:
            path = _unpack_if_packed(_find_given(Path(from_file), name, file), folder, file)
        else:
            path = folder / file.name
            if not path.is_file():
                _obtain(name, file, folder)
        _verify(path, file)
        # What is known to be right has not changed, whenever it was downloaded.
        changed_ns = 0 if file.checksum or from_file is None else path.stat().st_mtime_ns
        found.append(SourceFile(str(path), file.name, path.stat().st_size, changed_ns))
    return found


def find_stdlib() -> list[tuple[Path, str]]:
    """The source of the Python that runs, each file with its name in it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(file.relative_to(root).parts))
    if not files:
        raise UserError(f"this Python keeps no source of its standard library in {root}; prepare a text file instead")
    return [(file, str(file.relative_to(root))) for file in files]


def _find_given(given: Path, name: str, file: CorpusFile) -> Path:
    given = given.expanduser().resolve()
    if given.is_file():
        if len(CORPORA[name]) > 1:
            raise UserError(
                f"--from {given} is one file and {name} has {len(CORPORA[name])}; give a folder that holds them all, "
                f"or prepare the file under its own name: gptmill prepare {given}"
            )
        return given
    if not given.is_dir():
        raise UserError(f"--from {given} does not exist; give the file or the folder that holds {name}")
    names = (file.name, file.stored_name, *(file.name + suffix for suffix in COMPRESSIONS))
    for candidate in names:
        for path in sorted(given.rglob(candidate)):
            if path.is_file():
                return path
    raise UserError(f"--from {given} lacks {file.name} of {name}; get it from {file.url}")


def _obtain(name: str, file: CorpusFile, folder: Path) -> None:
    """Puts a file into the cache: from its archive, where that is there already, or from the web."""
    target = folder / file.stored_name
    if not target.is_file():
        try:
            download_file(file.url, target, file.checksum if target.name == file.name else None)
        except DownloadError as error:
            raise _make_offline_error(name, folder, str(error)) from None
    if _unpack_if_packed(target, folder, file) != target:
        target.unlink()


def _make_offline_error(name: str, folder: Path, reason: str) -> UserError:
    files = CORPORA[name]
    urls, place = files[0].url, str(folder / files[0].stored_name)
    if len(files) > 1:
        urls, place = f"the {len(files)} files from {files[0].url} to {files[-1].stored_name}", f"{folder}/"
    return UserError(
        f"cannot download {name} ({reason}); fetch {urls} elsewhere and put it into place as {place}, "
        f"or say where it is with --from FILE"
    )


def _verify(path: Path, file: CorpusFile, archive: Path | None = None) -> None:
    if file.checksum is None:
        return
    try:
        found = hash_content(path, file.checksum)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check its permissions") from None
    if found != file.checksum:
        where = f"{file.name} in {archive}" if archive else str(path)
        raise UserError(f"{where} is not what it should be: {found}, not {file.checksum}; get it again")


def _is_packed(name: str) -> bool:
    return name.endswith(ZIP) or split_compression(name)[1] is not None


def _unpack_if_packed(path: Path, folder: Path, file: CorpusFile) -> Path:
    """The path itself; where it is an archive and the file of the corpus is none, what is in it, put into `folder`."""
    if _is_packed(file.name) or not _is_packed(path.name):
        return path
    _, compression = split_compression(path.name)
    target = folder / file.name
    partial = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as packed, partial.open("wb") as content:
            if compression:
                shutil.copyfileobj(io.BufferedReader(UnpackedFile(packed, compression, str(path))), content)
            else:
                _unpack_zip(packed, content, path, file.name)
        _verify(partial, file, path)
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot unpack {path} to {target}: {error.strerror or error}; make room there") from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def _unpack_zip(packed: IO[bytes], content: IO[bytes], path: Path, member: str) -> None:
    try:
        with zipfile.ZipFile(packed) as archive, archive.open(member) as file:
            shutil.copyfileobj(file, content)
    except KeyError:
        raise UserError(f"{path} holds no file {member}; download it again") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path} is no sound zip file: {error}; download it again") from None

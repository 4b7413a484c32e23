"""Named corpora: where to download them, where they are cached, and the checksums that verify them."""

from __future__ import annotations

import io
import shutil
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.files import find_cache_dir
from gptmill.data.sources.compression import COMPRESSIONS, DecompressedFile, split_compression
from gptmill.data.sources.download import DownloadError, check_disk_space, download_file, hash_content
from gptmill.data.sources.source import SourceFile

PYTHON_STDLIB = "python-stdlib"
# Not what people mean by the library's source: its tests, installed packages, and modules of lookup tables.
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"})
HUB = "https://huggingface.co/datasets"
# Pinned revisions, so that a name means the same text next year.
FINEWEB_EDU = f"{HUB}/HuggingFaceFW/fineweb-edu/resolve/fc9850dff5e2d0f8f776efe41b24a1c49556cfc5/sample/10BT"
OPENWEBTEXT = f"{HUB}/Skylion007/openwebtext/resolve/79d93d786212f7344586290adb811d4ae6a1762c/plain_text"
FINEWEB_EDU_BYTES = (
    *(2_152_819_114, 2_152_222_432, 2_151_796_315, 2_152_437_524, 2_152_338_550, 2_152_189_947, 2_152_689_867),
    *(2_150_686_637, 2_151_274_846, 2_151_913_277, 2_152_798_864, 2_152_323_681, 2_152_069_689, 540_632_672),
)
# The folders that recipes read, by the corpus that is meant: an error about a missing folder then names its source.
USUAL_FOLDERS = {"edu_fineweb10B": "fineweb-edu-10B", "shakespeare-char": "tiny-shakespeare", "enwik8": "enwik8"}
ZIP = ".zip"


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus. It is extracted if the URL is an archive and `name` is not."""

    name: str
    url: str
    size_bytes: int = 0  # 0 if unknown
    checksum: str | None = None  # of the file, not of the archive; without one, the server's own is used

    @property
    def stored_name(self) -> str:
        """The name of the downloaded file: that of the archive if it is one."""
        name = self.url.rpartition("/")[2]
        return name if _is_archive(name) and not _is_archive(self.name) else self.name


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
    """Returns the files of a corpus: from `from_file`, or from the cache, downloading what is missing."""
    folder = find_cache_dir() / "corpora" / name
    if from_file is None:
        missing = [file.size_bytes for file in CORPORA[name] if not (folder / file.name).is_file()]
        check_disk_space(folder, sum(missing))  # for all files, before spending hours on the first
    found = []
    for file in CORPORA[name]:
        if from_file is not None:
            path = _extract_if_archive(_find_given(Path(from_file), name, file), folder, file)
        else:
            path = folder / file.name
            if not path.is_file():
                _fetch(name, file, folder)
        _verify(path, file)
        # The content is verified or pinned, so the time of the download says nothing about it.
        mtime_ns = 0 if file.checksum or from_file is None else path.stat().st_mtime_ns
        found.append(SourceFile(str(path), file.name, path.stat().st_size, mtime_ns))
    return found


def count_download_bytes(name: str) -> int:
    """The size of a corpus as far as it is known before it is downloaded."""
    return sum(file.size_bytes for file in CORPORA.get(name, ()))


def find_stdlib() -> list[tuple[Path, str]]:
    """Returns the source files of the running Python's standard library, each with its relative name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(file.relative_to(root).parts))
    if not files:
        raise UserError(f"{root} has no source files of the standard library; prepare a text file instead")
    return [(file, str(file.relative_to(root))) for file in files]


def _find_given(given: Path, name: str, file: CorpusFile) -> Path:
    given = given.expanduser().resolve()
    if given.is_file():
        if len(CORPORA[name]) > 1:
            raise UserError(
                f"--from {given} is one file and {name} has {len(CORPORA[name])}; give a folder that has them all, "
                f"or prepare the file by itself: gptmill prepare {given}"
            )
        return given
    if not given.is_dir():
        raise UserError(f"--from {given} does not exist; give the file or the folder that holds {name}")
    names = (file.name, file.stored_name, *(file.name + suffix for suffix in COMPRESSIONS))
    for candidate in names:
        for path in sorted(given.rglob(candidate)):
            if path.is_file():
                return path
    raise UserError(f"--from {given} lacks {file.name} of {name}; download it from {file.url}")


def _fetch(name: str, file: CorpusFile, folder: Path) -> None:
    """Adds a file to the cache, downloading it unless its archive is there already."""
    target = folder / file.stored_name
    if not target.is_file():
        try:
            download_file(file.url, target, file.checksum if target.name == file.name else None)
        except DownloadError as error:
            raise _make_offline_error(name, folder, str(error)) from None
    if _extract_if_archive(target, folder, file) != target:
        target.unlink()


def _make_offline_error(name: str, folder: Path, reason: str) -> UserError:
    files = CORPORA[name]
    urls, target = files[0].url, str(folder / files[0].stored_name)
    if len(files) > 1:
        urls, target = f"the {len(files)} files from {files[0].url} to {files[-1].stored_name}", f"{folder}/"
    return UserError(
        f"cannot download {name} ({reason}); download {urls} on another machine and copy it to {target}, "
        f"or name a local copy with --from FILE"
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
        raise UserError(f"{where} has the wrong checksum: {found}, not {file.checksum}; download it again")


def _is_archive(name: str) -> bool:
    return name.endswith(ZIP) or split_compression(name)[1] is not None


def _extract_if_archive(path: Path, folder: Path, file: CorpusFile) -> Path:
    """Returns the path itself or, if it is the archive of the corpus file, that file extracted into `folder`."""
    if _is_archive(file.name) or not _is_archive(path.name):
        return path
    _, compression = split_compression(path.name)
    target = folder / file.name
    partial = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as archive, partial.open("wb") as content:
            if compression:
                decompressed = DecompressedFile(archive, compression, str(path), ReadingOptions.max_expansion)
                shutil.copyfileobj(io.BufferedReader(decompressed), content)
            else:
                _extract_from_zip(archive, content, path, file.name)
        _verify(partial, file, path)
        partial.replace(target)
    except OSError as error:
        raise UserError(
            f"cannot extract {path} to {target}: {error.strerror or error}; free disk space there"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def _extract_from_zip(stored: IO[bytes], content: IO[bytes], path: Path, member: str) -> None:
    try:
        with zipfile.ZipFile(stored) as archive, archive.open(member) as file:
            shutil.copyfileobj(file, content)
    except KeyError:
        raise UserError(f"{path} has no member {member}; download it again") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path} is not a valid zip file: {error}; download it again") from None

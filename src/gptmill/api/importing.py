"""import_model: models of other software become runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gptmill.api.configuration import Recipe
from gptmill.api.progress import show_amount
from gptmill.api.run import Run
from gptmill.config.errors import UserError
from gptmill.config.import_request import ImportRequest
from gptmill.config.json_text import parse_json
from gptmill.config.keywords import build_request
from gptmill.data.tokenizers import Tokenizer, build_tokenizer, find_file, list_names
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.folder import build_from_definition
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, read_definition
from gptmill.inference.importing.reading import read_published
from gptmill.inference.importing.run_writer import check_target, write_run
from gptmill.runs.directory import RunDirectory


def import_model(
    source: Recipe, out: Recipe, *, tokenizer: Recipe | None = None, logdir: Recipe = "runs", overwrite: bool = False
) -> Run:
    """Makes a run of a Hugging Face folder, a GGUF file, llm.c's .bin or nanoGPT's ckpt.pt, with its tokenizer.

    `out` is a name in `logdir`, or the path of a folder. The run samples, evaluates and exports like one that was
    trained here, and `train(init_from=...)` trains it further.
    """
    given = {"out": out, "tokenizer": tokenizer, "logdir": logdir, "overwrite": overwrite}
    return run_import(os.fspath(source), build_request(ImportRequest, given))


def run_import(source: str, request: ImportRequest) -> Run:
    """As `import_model`."""
    run = find_target(request)
    check_target(run, overwrite=request.overwrite)
    model = read_published(source)
    tokenizer = model.build_tokenizer() if request.tokenizer is None else build_given_tokenizer(request.tokenizer)
    model.check_vocabulary(tokenizer)
    for remark in model.remarks:
        sys.stderr.write(f"note: {remark}\n")
    with show_amount("converting", "million parameters") as report:
        write_run(run, model, tokenizer, lambda done, total: report(done // 10**6, total // 10**6))
    return Run(run)


def find_target(request: ImportRequest) -> RunDirectory:
    """The folder of the run: `out` itself if it is a path, else the folder of that name in logdir."""
    out = request.out
    if not out:
        raise UserError("--out is missing: name the run to make, or give the path of a folder")
    path = Path(out) if set(out) & {os.sep, os.altsep} else Path(request.logdir) / out
    if path.name in ("", ".", "..") or path.name.startswith("."):
        raise UserError(f"--out {out} names no folder that gptmill would find again; choose another name")
    return RunDirectory(path)


def build_given_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that the user names, as the model's own: with the token that begins its documents."""
    if name == CharTokenizer.name:
        raise UserError("--tokenizer char: its characters depend on a corpus; give a tokenizer.json instead")
    if name in list_names():
        return build_tokenizer(name, ())
    path = find_file(name)
    folder = path.parent if path.name == FILE_NAME else None
    return build_from_definition(parse_json(read_definition(path)), folder, str(path))

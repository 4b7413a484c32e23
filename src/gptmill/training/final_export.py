"""--export_best: exports the best checkpoint once the run has ended. A failure is reported and changes nothing else."""

from __future__ import annotations

import shlex
import sys

from gptmill.config.errors import UserError
from gptmill.config.export_request import ExportRequest
from gptmill.config.requests import LoadingOptions
from gptmill.config.run import RunConfig
from gptmill.inference.export.exporting import check_exportable, check_request, export
from gptmill.inference.export.passes import stay_silent
from gptmill.runs.checkpoints.tiers import BEST, read_tiers
from gptmill.runs.directory import RunDirectory


def check_final_export(config: RunConfig) -> None:
    """Raises UserError for a model that the format cannot represent: before the first step, not after the last."""
    to = config.checkpoints.export_best
    if to is None:
        return
    try:
        check_request(ExportRequest(to=to))
        check_exportable(config.model, to)
    except UserError as error:
        raise UserError(f"--export_best {to}: {error}") from None


def export_best(run: RunDirectory, config: RunConfig) -> None:
    """Exports best_model, or latest without one, into the run's folder; an earlier export there is replaced."""
    to = config.checkpoints.export_best
    if to is None:
        return
    wanted = "best" if BEST in read_tiers(run.checkpoints) else "latest"
    target = run.path / "export" / (f"{run.path.name}.gguf" if to == "gguf" else to)
    request = ExportRequest(to=to, out=str(target), overwrite=True, loading=LoadingOptions(wanted, device="cpu"))
    again = f"gptmill export {shlex.quote(str(run.path))} --to {to} --checkpoint {wanted}"
    try:
        result = export(str(run.path), request, stay_silent)
        sys.stdout.write(f"exported {result.path}: {result.verification.describe()}\n")
    except KeyboardInterrupt:
        sys.stderr.write(f"warning: the export was interrupted; repeat it with: {again}\n")
    except Exception as error:  # the run has ended well, whatever happens here
        sys.stderr.write(f"warning: {to} was not exported: {error}; repeat it with: {again}\n")

"""Text sources: local and remote files (s3://, gs://, https://), Hugging Face datasets, named corpora, standard input.

Each is read as a stream of documents in bounded memory. Knows compressions and formats; knows no tokens and no shards.
"""

from __future__ import annotations

from gptmill.data.sources.cutting import MAX_DOCUMENT_CHARS
from gptmill.data.sources.defects import Defect, DefectReport
from gptmill.data.sources.document_stream import DocumentStream, open_documents, read_documents
from gptmill.data.sources.formats import FORMATS
from gptmill.data.sources.named_corpora import CORPORA, PYTHON_STDLIB, USUAL_FOLDERS, count_download_bytes
from gptmill.data.sources.parts import list_parts
from gptmill.data.sources.resolver import make_source_name, resolve_source
from gptmill.data.sources.source import Part, Source, SourceFile

__all__ = [
    "CORPORA",
    "FORMATS",
    "MAX_DOCUMENT_CHARS",
    "PYTHON_STDLIB",
    "USUAL_FOLDERS",
    "Defect",
    "DefectReport",
    "DocumentStream",
    "Part",
    "Source",
    "SourceFile",
    "count_download_bytes",
    "list_parts",
    "make_source_name",
    "open_documents",
    "read_documents",
    "resolve_source",
]

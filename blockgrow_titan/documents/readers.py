"""The kinds of datasets, by the names that ``training.dataset`` and ``validation.dataset`` take.

A new kind is a new ``TextReader``, or a ``RecordReader`` for token ids (``records.py``), and a line in
``RECORD_READERS``; a module of yours that ``experimental.custom_import`` names may add it.
"""

from blockgrow_titan.documents.fineweb_edu import FineWebEduReader
from blockgrow_titan.documents.jsonl import JsonlReader
from blockgrow_titan.documents.pretokenized import PretokenizedReader
from blockgrow_titan.documents.records import BadDocumentError, ReaderConfig, RecordReader, TextReader
from blockgrow_titan.documents.tables import DatasetsReader, ParquetReader

__all__ = ["RECORD_READERS", "BadDocumentError", "ReaderConfig", "RecordReader", "TextReader"]

RECORD_READERS: dict[str, type[RecordReader]] = {
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "datasets": DatasetsReader,
    "fineweb_edu": FineWebEduReader,
    "pretokenized": PretokenizedReader,
}

"""The shard format: manifest, shards of stripes, lengths and vocabulary. README.md shows the
bytes."""

from elastrata_pipelines.format.files import file_problem, file_problems, write_file
from elastrata_pipelines.format.manifest import (
    FORMAT_VERSION,
    HELD_OUT,
    MANIFEST,
    FileEntry,
    Manifest,
    SourceEntry,
    Vocabulary,
    read_held_out,
)
from elastrata_pipelines.format.shard import (
    open_shard,
    read_shard,
    read_stripes,
    shard_schema,
    write_shard,
)

__all__ = [
    "FORMAT_VERSION",
    "HELD_OUT",
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "SourceEntry",
    "Vocabulary",
    "file_problem",
    "file_problems",
    "open_shard",
    "read_held_out",
    "read_shard",
    "read_stripes",
    "shard_schema",
    "write_file",
    "write_shard",
]

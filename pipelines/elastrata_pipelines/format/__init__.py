"""The shard format: manifest, shards of stripes, lengths, vocabulary. README.md shows the bytes."""

from elastrata_pipelines.format.checked import write_file
from elastrata_pipelines.format.manifest import FORMAT_VERSION, MANIFEST, FileEntry, Manifest
from elastrata_pipelines.format.shard import read_stripes, shard_schema, write_shard
from elastrata_pipelines.format.vocabulary import Vocabulary

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "Vocabulary",
    "read_stripes",
    "shard_schema",
    "write_file",
    "write_shard",
]

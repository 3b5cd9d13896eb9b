"""Data: rows in, memory-mapped token sets out.

rows, hub      where rows come from          tokenise   words to token ids
formats, chat  what a row means              fit        documents into rows no longer than a sample
requests       which sets, by which hash     pack       which rows share a sample
build          find a set or make it, once   writer     streaming to disk, whole or absent
inputs         the entry                     tokens     reading a set
"""

from gangline.worker.data.tokens import NO_TARGET, Sample, TokenSet, verify

__all__ = ["NO_TARGET", "Sample", "TokenSet", "verify"]

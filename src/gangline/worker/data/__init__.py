"""Data: rows in, memory-mapped token sets out.

rows           rows of files                 tokenise       text and conversations to token ids
row_formats    the documents of a row        tokens         a token set: writing, packing, reading
chat_template  a conversation as text        conversations  the parts of a conversation that are learned
build          find a set or make it once    model_folder   the model's limits, files and fingerprint; the hub
choose         which rows, and how often     remote         files at an address
prepare        the entry
"""

from gangline.worker.data.tokens import NO_TARGET, Sample, TokenSet, verify

__all__ = ["NO_TARGET", "Sample", "TokenSet", "verify"]

"""A tokenizer read from `tokenizer.json` by the package tokenizers alone: transformers takes seconds to import.

It answers what `tokenise` asks of a tokenizer of transformers. A model whose tokenizer class changes what its file says
when transformers loads it may get other tokens in training; for looks at data, not for token sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.runs.files import read_json

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFile:
    """The tokenizer of a model folder."""

    is_fast = True

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ValueError for files that cannot be read."""
        from tokenizers import Tokenizer

        try:
            self.backend_tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        said = {**_optional(folder / "special_tokens_map.json"), **_optional(folder / "tokenizer_config.json")}
        self.special_tokens_map: dict[str, str] = {
            role: content for role in _ROLES if (content := _content(said.get(role))) is not None
        }
        self.chat_template: Any = _template(folder, said)

    @property
    def eos_token(self) -> str | None:
        """The end-of-text token."""
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        found: int | None = self.backend_tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        return found

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        """Id -> text of the tokens that were added to the vocabulary, special ones among them."""
        return {number: token.content for number, token in self.backend_tokenizer.get_added_tokens_decoder().items()}

    def __call__(self, texts: str | list[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """The ids of one text, or of each of several."""
        if isinstance(texts, str):
            return {"input_ids": self.backend_tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        found = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in found]}

    def decode(self, ids: list[int], **_: Any) -> str:
        """The text of tokens, special ones too."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _template(folder: Path, said: dict[str, Any]) -> Any:
    """chat_template.jinja before chat_template of tokenizer_config.json, as transformers does."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    legacy = folder / "chat_template.json"
    template = said.get("chat_template") or (
        json.loads(legacy.read_text(encoding="utf-8")).get("chat_template") if legacy.is_file() else None
    )
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template

"""Types of fields that more than one file knows: names, shorthands, "none"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gangline.plugins import Table
from gangline.units import DURATION as A_DURATION

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
MODULE = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
TARGET = r"^(regex:.+|[A-Za-z0-9_][A-Za-z0-9_.-]*)$"
INIT = r"^(default|gaussian|orthogonal|pissa(_niter_[0-9]{1,3})?|olora)$"
LAYERS = r"^[0-9]{1,4}-[0-9]{1,4}$"
ADDRESS = r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$"
DESTINATION = (
    r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?"
    r"([A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:]{2,39}(%[A-Za-z0-9_.-]{1,15})?)$"
)
HOST_KEY = (
    r"^(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa|sk-ssh-ed25519@openssh\.com"
    r"|sk-ecdsa-sha2-nistp256@openssh\.com) [A-Za-z0-9+/]{32,3000}={0,2}$"
)
HOST_PATH = r"^(/|~/)[\w .+@%=,/-]*$"
HOST_PROGRAM = r"^((/|~/)[\w .+@%=,/-]*[\w+]|[A-Za-z0-9_][A-Za-z0-9_.+-]*)$"
ROOT_PATH = r"^/[\w .+@%=,/-]*$"
IMAGE = r"^[a-z0-9][\w.:/@-]*$"
LOADABLE = r"^[A-Za-z0-9_][A-Za-z0-9_.+/-]*$"
FINDING = r"^E-[A-Z]+-[0-9]{2}$"
PORTS = r"^[1-9][0-9]{2,4}-[1-9][0-9]{2,4}$"
PLUGIN = r"^[A-Za-z][A-Za-z0-9_.-]{0,62}$"
DURATION = f"^{A_DURATION.pattern}$"
ADDRESS_PLACE = r"^(env:[A-Za-z_][A-Za-z0-9_]{0,127}|file:[^\n\x00]{1,1024})$"

SLURM_WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,:@\[\]&|*-]*$"
SLURM_GPUS = r"^([A-Za-z0-9_.-]+:)?[1-9][0-9]{0,3}$"
SLURM_TIME = r"^([0-9]+-)?[0-9]{1,6}(:[0-9]{1,2}){0,2}$"
SLURM_MEMORY = r"^[0-9]+[KMGT]?$"
SLURM_OPTION = r"^--[a-z][a-z-]*(=[^\n\x00]*)?$"

SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
"""Names of variables whose values belong in no file and in no message."""

PATTERNS = {
    NAME: "a name (at most 63 letters, digits, `.`, `_` and `-`, the first a letter or a digit)",
    MODULE: "a module name, such as q_proj",
    TARGET: "a module name, such as q_proj, or `regex:` and a regular expression",
    INIT: "default, gaussian, orthogonal, pissa, pissa_niter_N or olora",
    LAYERS: "a range of layers, such as 0-7",
    ADDRESS: "an IP address or a computer's name",
    DESTINATION: "a destination for `ssh`: a name of your ssh_config, or user@address",
    HOST_KEY: "a public key of sshd: its type, a space, and the key in base64",
    HOST_PATH: "a path on the host that begins with `/` or `~/`",
    HOST_PROGRAM: "a program on the host: its name, or a path that begins with `/` or `~/`",
    ROOT_PATH: "a path that begins with `/`",
    IMAGE: "the name of a container image, such as docker.io/pytorch/pytorch:2.13.0",
    LOADABLE: "a module of the host, such as cuda/12.8",
    FINDING: "the id of a finding, such as E-SEC-04",
    PORTS: "a range of ports, such as 29500-29599",
    PLUGIN: "the name of a plug-in",
    SLURM_WORD: "a name as Slurm has it",
    SLURM_GPUS: "a number of GPUs per node, such as 4, or a type and a number, such as a100:4",
    SLURM_TIME: "a time as Slurm writes it, such as 04:00:00, 1-12:00:00 or 90 (minutes)",
    SLURM_MEMORY: "an amount as Slurm writes it, such as 64G, or 0 for all of it",
    SLURM_OPTION: "an option of sbatch, such as --reservation=maintenance",
    ADDRESS_PLACE: "env: and the name of a variable, or file: and a path",
    DURATION: "a time with its unit, such as 30s, 5m or 2h",
}
"""What a pattern means, for messages and for the reference."""

Name = Annotated[str, Field(pattern=NAME)]
ModuleName = Annotated[str, Field(pattern=MODULE)]
Target = Annotated[str, Field(pattern=TARGET)]
LayerRange = Annotated[int, Field(ge=0, lt=10_000)] | Annotated[str, Field(pattern=LAYERS)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """One mapping of the user's words: unknown keys fail, and a value has the type that YAML gave it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A bare value in place of a mapping: `model: ./path` for `model: {path: ./path}`."""

    key: str
    number_key: str | None = None
    """The key that a bare number stands for, where that is another one."""

    def expand(self, value: Any) -> Any:
        """The mapping that a bare value stands for."""
        if value is None or isinstance(value, dict):
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {self.number_key if self.number_key and is_number else self.key: value}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = handler(schema)
        fields = handler.resolve_ref_schema(whole)["properties"]
        keys = [self.key, *([self.number_key] if self.number_key else [])]
        bare = [_bare(fields[key]) for key in keys]
        return {"anyOf": [*bare, whole]}


@dataclass(frozen=True, slots=True)
class OrSeveral(Shorthand):
    """As `Shorthand`, and a list in place of a mapping, where an item says more than a path."""

    several: str = "sources"
    """The key that such a list stands for."""
    prefix: str = "hub:"
    """A text that begins so says more than a path, too."""

    def expand(self, value: Any) -> Any:
        """The mapping that a bare value stands for."""
        items = value if isinstance(value, list) else []
        if any(isinstance(item, dict) for item in items) or (
            len(items) > 1 and any(isinstance(item, str) and item.startswith(self.prefix) for item in items)
        ):
            return {self.several: items}
        return Shorthand.expand(self, value)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = Shorthand.__get_pydantic_json_schema__(self, schema, handler)
        *bare, whole = found["anyOf"]
        items = handler.resolve_ref_schema(whole)["properties"][self.several]["anyOf"][0]
        # before the list of texts: the schema of an item is looked up in the first list
        return {"anyOf": [{"type": "string", "minLength": 1}, items, *bare, whole]}


@dataclass(frozen=True, slots=True)
class OneOrMore:
    """A bare text in place of a list of one."""

    numbers: bool = False
    """Whether a bare whole number stands for such a list, too."""

    def expand(self, value: Any) -> Any:
        """The list that a bare value stands for."""
        is_number = self.numbers and isinstance(value, int) and not isinstance(value, bool)
        return [value] if is_number or isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = handler(schema)
        return {"anyOf": [whole["items"], whole]}


@dataclass(frozen=True, slots=True)
class OrWord:
    """A word in place of a value: `failures: stop` for no restarts."""

    word: str
    value: Any
    """What the word means."""

    def expand(self, value: Any) -> Any:
        """What the word means, for the word."""
        return self.value if value == self.word else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = handler(schema)
        kinds = whole.get("anyOf", [whole])
        return {"anyOf": [*kinds, {"const": self.word}]}


@dataclass(frozen=True, slots=True)
class RowOf:
    """The name of a row of a table, a built-in one or a plug-in's."""

    table: Table[Any]
    words: tuple[str, ...] = ()
    """Words besides names of rows."""
    without: tuple[str, ...] = ()
    """Rows that a file cannot name."""

    def check(self, name: str) -> str:
        """The name; raises for one that the table lacks."""
        if name in self.without or (name not in self.words and name not in self.table):
            raise PydanticCustomError("unknown_row", "unknown name")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # all that is installed, for messages; `schema.py` takes the plug-ins of this computer out again
        names, built_in = (
            [*self.words, *(name for name in names if name not in self.without)]
            for names in (self.table, self.table.built_in)
        )
        return {"type": "string", "enum": names, "x-built-in": built_in}


@dataclass(frozen=True, slots=True)
class OrNone(OrWord):
    """`none`, or another word, in place of YAML's `null`, which few people know."""

    word: str = "none"
    value: None = None


def _bare(fragment: JsonSchemaValue) -> JsonSchemaValue:
    return {key: value for key, value in fragment.items() if key not in {"default", "description", "title", "examples"}}

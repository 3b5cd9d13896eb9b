"""How a verb is written, in its help and on the man page: `gangline plan [OPTIONS] JOB [KEY=VALUE ...]`.

Versions of typer differ in it, and tell the types of Python.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


def spelled(metavar: str, *, many: bool, required: bool) -> str:
    """One argument."""
    word = f"{metavar} ..." if many else metavar
    return word if required else f"[{word}]"


class Verb(TyperCommand):
    """A verb with plain words in its help."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the name of the verb."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        words = [spelled(str(each.metavar), many=each.nargs == -1, required=each.required) for each in arguments]
        return ["[OPTIONS]", *words]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """What every argument and option is."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            rows = []
            for each in self.get_params(ctx):
                record = each.get_help_record(ctx) if each.param_type_name == kind else None
                if record is not None:
                    rows.append((str(each.metavar) if kind == "argument" else record[0], record[1]))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

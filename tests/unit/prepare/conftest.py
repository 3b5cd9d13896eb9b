"""Everything that a test here has planned is looked at for what is forbidden."""

from tests.forbidden_commands import nothing_forbidden  # noqa: F401  (a fixture)

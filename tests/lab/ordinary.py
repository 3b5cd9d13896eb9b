"""A user without any privilege: an account on every machine of a lab, and what that user types on the desk.

In a lab of an ordinary user (rootless) that is the lab's own user. Elsewhere an account is made, with a home folder, a
key for all hosts and no way to become anybody else: what runs there has "no new privileges", so that sudo is of no use.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab.hosts import Lab, LabHost

LOGIN = "alice"
NUMBER = 42042
HOME = Path("/home") / LOGIN
ACCOUNT = """
umask 022
chmod 711 "$HOME"                                    # what tests run with may lie below the home of root
printf '%s\\n' "$1:x:$2:$2::$3:/bin/bash" >> /etc/passwd
mkdir -m 700 -p "$3/.ssh"
for name in authorized_keys config id_ed25519 id_ed25519.pub known_hosts; do
    [ ! -e "$HOME/.ssh/$name" ] || cp "$HOME/.ssh/$name" "$3/.ssh/"
done
[ ! -e "$3/.ssh/config" ] || sed -i "s/User root/User $1/" "$3/.ssh/config"
chmod 700 "$3" "$3/.ssh" && chmod -R go= "$3/.ssh" && chown -R "$2:$2" "$3"
"""


class User:
    """What an ordinary user does on the machines of a lab."""

    def __init__(self, lab: Lab, *, login: str = LOGIN, number: int = NUMBER) -> None:
        """login, number: of the account, where one is made; a second user has others."""
        self.lab = lab
        self._number = number
        self.umask = "022"
        """Of the user's shell on the desk."""
        self.env: dict[str, str] = {}
        """Of that shell."""
        self._is_lab_user = lab.mode.rootless
        self.home = Path(lab.mode.home) if self._is_lab_user else HOME.with_name(login)
        self.login = lab.mode.login if self._is_lab_user else login
        for machine in () if self._is_lab_user else (lab.user, *lab.hosts):
            machine.check(["sh", "-ec", ACCOUNT, "account", login, str(number), str(self.home)])

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command as this user runs it, with the umask of the user's shell."""
        shell = ["sh", "-c", 'umask "$0"; exec "$@"', self.umask, *argv]
        if self._is_lab_user:
            return shell
        return [
            "setpriv",
            f"--reuid={self._number}",
            f"--regid={self._number}",
            "--clear-groups",
            "--no-new-privs",
            "--",
            *shell,
        ]

    def popen(self, argv: Sequence[str], *, on: LabHost | None = None, **options) -> subprocess.Popen:
        """Start a command, on the desk unless told otherwise; see `LabHost.popen`."""
        return (on or self.lab.user).popen(self.argv(argv), **self._options(on, options))

    def run(self, argv: Sequence[str], *, on: LabHost | None = None, **options) -> subprocess.CompletedProcess:
        """Run a command to its end, on the desk unless told otherwise; see `LabHost.run`."""
        return (on or self.lab.user).run(self.argv(argv), **self._options(on, options))

    def check(self, argv: Sequence[str], *, on: LabHost | None = None, **options) -> str:
        """As `run`, for a command that has to work."""
        return (on or self.lab.user).check(self.argv(argv), **self._options(on, options))

    def write(self, path: str, text: str, *, on: LabHost | None = None) -> None:
        """Write a file; the path begins at the home folder."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self.check(["sh", "-c", script, "write", path], on=on, stdin=text)

    def read(self, path: str, *, on: LabHost | None = None) -> str:
        """The content of a text file."""
        return self.check(["cat", path], on=on)

    def _options(self, on: LabHost | None, options: dict) -> dict:
        who = {"HOME": str(self.home), "USER": self.login, "LOGNAME": self.login}
        env = {**who, **(self.env if on is None else {}), **options.pop("env", {})}
        return {"cwd": str(self.home), **options, "env": env}

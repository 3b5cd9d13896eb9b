"""A real sshd without a network: ssh starts it as its proxy, with keys and a configuration of its own."""

import os
import pwd
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gangline.runs.cluster import Host
from gangline.transport.ssh import SshTransport

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


class Sshd:
    """One host behind ssh; it is this computer."""

    def __init__(self, folder: Path) -> None:
        if SSHD is None or shutil.which("ssh") is None:
            pytest.skip("no sshd or no ssh on this machine (apt install openssh-server openssh-client)")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd locks itself in before a login
        self.folder = folder
        self.config = folder / "ssh_config"
        self.host_key = self.new_key("host_key")
        self.new_key("user_key")
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        self.answer_with()

    def new_key(self, name: str) -> str:
        """Make a key in the place of an older one; its public half."""
        for path in (self.folder / name, self.folder / f"{name}.pub"):
            path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        return " ".join((self.folder / f"{name}.pub").read_text().split()[:2])

    def answer_with(self, *options: str, proxy: str | None = None, path: Path | None = None) -> None:
        """Write the ssh_config: sshd options, or a program in the place of sshd; the PATH of who logs in."""
        sshd = [SSHD, "-i", "-f", "none", "-h", self.folder / "host_key"]
        fixed = [f"AuthorizedKeysFile={self.folder}/authorized_keys", "StrictModes=no", "UsePAM=no", "PidFile=none"]
        if path:  # after whatever the files of the login shell have made of it
            fixed.append(f'ForceCommand=export PATH={path}; exec sh -c "$SSH_ORIGINAL_COMMAND"')
        for option in (*options, *fixed, f"SetEnv=PATH={os.environ['PATH']}"):
            sshd += ["-o", option]
        words = proxy or " ".join(shlex.quote(str(word)) for word in sshd)
        lines = [
            "Host *",
            f"    User {pwd.getpwuid(os.getuid()).pw_name}",
            f"    IdentityFile {self.folder}/user_key",
            "    IdentitiesOnly yes",
            "    IdentityAgent none",
            f"    ProxyCommand {words}",
        ]
        self.config.write_text("\n".join(lines) + "\n")

    def host(self, **options) -> Host:
        """The host as a cluster describes it."""
        known = {"name": "pc1", "workdir": str(self.folder / "work"), "python": "python", "host_key": self.host_key}
        return Host(**{**known, "transport": "ssh", **options})

    def transport(self, **options) -> SshTransport:
        """A transport to it."""
        return SshTransport(self.host(**options), ssh_config=self.config)

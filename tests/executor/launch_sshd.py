"""An sshd of the tests' own on loopback, for its own user, with keys made for it."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor.launch.start import free_port

CONFIG = """\
{listen}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
"""


@dataclass(frozen=True)
class Sshd:
    """Where it listens, and what to tell ``--launcher-options``."""

    port: int
    options: str
    log: Path

    def hosts(self, folder: Path, *lines: str) -> str:
        """A file of hosts; ``lines`` without the port."""
        path = folder / "hosts.txt"
        path.write_text("".join(f"{line} port={self.port}\n" for line in lines))
        return str(path)


@contextmanager
def running_sshd(
    folder: Path,
    port: int | None = None,
    addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2"),
    inside: Sequence[str] = (),
) -> Iterator[Sshd]:
    """Skips the test where there is no sshd. ``inside`` are words in front of its command; servers
    of one folder have the same keys."""
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if sshd is None or missing:
        pytest.skip("no sshd, ssh or ssh-keygen here (Debian: openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        if not (folder / name).exists():
            subprocess.run(words, check=True, capture_output=True)
    port = port or free_port()
    log, config = folder / f"{addresses[0]}.log", folder / f"{addresses[0]}.config"
    listen = "\n".join(f"ListenAddress {address}:{port}" for address in addresses)
    config.write_text(CONFIG.format(port=port, folder=folder, listen=listen))
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*inside, sshd, "-D", "-e", "-f", str(config)], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 20
        while log.read_text().count("Server listening") < len(addresses):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd does not start here: {log.read_text()[-300:]}")
            time.sleep(0.05)
        options = (
            f"-F none -i {folder / 'user'} -o IdentitiesOnly=yes -o UserKnownHostsFile=/dev/null "
            f"-o StrictHostKeyChecking=no -l {getpass.getuser()}"
        )
        yield Sshd(port, options, log)
    finally:
        server.terminate()
        server.wait(20)

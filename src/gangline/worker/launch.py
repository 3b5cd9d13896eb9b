"""torchrun for hosts that are all this computer: the store in which launchers meet listens on the loopback address.

    python -m gangline.worker launch -m torch.distributed.run OPTIONS...

torch's TCPStore listens on all interfaces unless it is given a socket, and anybody who reaches it can run code as us.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from gangline.worker import compat

_BACKLOG = 2048
"""As many as torch's own socket may have waiting."""


def launch_main(argv: list[str]) -> int:
    """Be torchrun with the words behind its name."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    words = argv[2:] if argv[:1] == ["-m"] else argv
    store = partial(loopback_store, dist.TCPStore)
    compat.STATIC_STORE.put(static_tcp_rendezvous, store)
    compat.DYNAMIC_STORE.put(c10d_rendezvous_backend, store)
    run.main(words)
    return 0


def loopback_store(
    make: Callable[..., dist.Store], host: str, port: int, *words: Any, is_master: bool | None = None, **more: Any
) -> dist.Store:
    """A TCPStore that listens on the loopback address alone where it is the one that listens.

    words: world_size, is_master and so on, as they are given to `make`. Raises OSError where the port is taken.
    """
    serves = bool(words[1] if len(words) > 1 else is_master)
    if is_master is not None:
        more["is_master"] = is_master
    if not serves or not is_loopback(host):
        return make(host, port, *words, **more)
    listener = listening(host, port)
    own = listener.getsockname()[1]
    return make(host, own, *words, master_listen_fd=listener.detach(), **more)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, as torch wants it. port: 0: any."""
    listener = socket.create_server(("127.0.0.1" if host == "localhost" else host, port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether an address or name leads to this computer alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False

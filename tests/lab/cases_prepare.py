"""What the desk does to hosts of a lab by the engine of `gangline prepare`: changes that lock it out."""

import time
from concurrent.futures import ThreadPoolExecutor

from gangline.errors import HostUnreachable
from gangline.prepare.host_side import HostSide, Passwords, new_txn
from gangline.prepare.prepare_step import Asks, CommandChange, FileChange, StepPlan
from gangline.runs.cluster import Host
from gangline.transport.ssh import SshTransport

AT_ONCE = 7
SHUT_S = 15.0


def _side(name, host_key):
    host = Host(name=name, workdir="/tmp", python="", transport="ssh", host_key=host_key)
    transport = SshTransport(host)
    return HostSide(name, transport, user="root", passwords=Passwords(lambda _question: None)), transport


def logs_in(name, host_key):
    """Whether a new login works."""
    side, transport = _side(name, host_key)
    try:
        return side.read(Asks()).user == "root"
    except HostUnreachable:
        return False
    finally:
        transport.close()


def _plan(changes, revert_s):
    made = []
    for change in changes:
        if change["kind"] == "file":
            before = None if change["before"] is None else change["before"].encode()
            made.append(FileChange(path=change["path"], before=before, content=change["content"].encode()))
        else:
            made.append(CommandChange(argv=tuple(change["argv"]), undo=tuple(change["undo"])))
    return StepPlan(changes=tuple(made), revert_s=revert_s)


def _lock_out(name, host_key, changes, revert_s, patience_s):
    """Change a host, and try to log in until that fails, then until it works; seconds from the change to either."""
    side, transport = _side(name, host_key)
    try:
        side.apply("lock-out", "root", _plan(changes, revert_s), txn=new_txn(), by="root@desk")
    except HostUnreachable:  # the change took effect before its answer could come
        pass
    finally:
        transport.close()
    begun, out_s, back_s = time.monotonic(), None, None
    while time.monotonic() < begun + SHUT_S and out_s is None:  # an sshd takes a moment to read its files again
        if not logs_in(name, host_key):
            out_s = time.monotonic() - begun
    while revert_s is not None and back_s is None and time.monotonic() < begun + revert_s + patience_s:
        if logs_in(name, host_key):
            back_s = time.monotonic() - begun
        else:
            time.sleep(0.5)
    return {"out_s": out_s, "back_s": back_s}


def lock_out_all(hosts, revert_s, patience_s):
    """Name -> what `_lock_out` saw, some hosts at the same time. hosts: name -> `host_key` and `changes`."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        seen = pool.map(
            lambda name: _lock_out(name, hosts[name]["host_key"], hosts[name]["changes"], revert_s, patience_s),
            hosts,
        )
        return dict(zip(hosts, seen, strict=True))


def who_logs_in(hosts):
    """Names of hosts at which a new login works."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        works = pool.map(lambda name: logs_in(name, hosts[name]), hosts)
        return [name for name, good in zip(hosts, works, strict=True) if good]

"""A gang without torch, on any Python >= 3.8: launchers that meet, ranks that find and need each other, all over TCP.

    fake_gang.py launcher JSON      {"node", "nodes", "meet": [address, port], "local", "folder", "ranks", "world",
                                     "steps", "control", "alone"}
    fake_gang.py prefork JSON      the same; where "control" is a folder, in the place of a rank
    fake_gang.py rank JSON          the same, with "rank", and "opens": it opens the place where ranks meet

It behaves as torchrun and gloo do where it matters: launchers of all hosts meet at one port, ranks connect to each other
at ports that the kernel chose, a rank that loses another one fails, one that hears nothing waits for ever, and a rank
that is told to leave tells the others. Prefork processes bear one rank after the other, as positions are given to them.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

PHASES = {"importing": 0, "joining": 1, "joined": 2, "compute": 4}


class Store:
    """Where launchers and ranks meet, on the first host."""

    def __init__(self, words):
        self.wanted = {"node": words["nodes"], "rank": words["world"]}
        self.known = {"node": {}, "rank": {}}
        self.changed = threading.Condition()
        self.door = socket.create_server(tuple(words["meet"]), backlog=64)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            connection, _ = self.door.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        line = connection.makefile().readline()
        if not line:
            return
        said = json.loads(line)
        kind = said["kind"]
        with self.changed:
            self.known[kind][str(said["number"])] = said["at"]
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.known[kind]) == self.wanted[kind])
        connection.sendall(json.dumps(self.known[kind]).encode() + b"\n")


def ask(words, kind, number, at):
    """Say that we are here, and wait until all are."""
    deadline = time.monotonic() + 300
    while True:
        try:
            connection = socket.create_connection(tuple(words["meet"]), 300)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    connection.sendall(json.dumps({"kind": kind, "number": number, "at": at}).encode() + b"\n")
    connection.settimeout(None)
    return connection, json.loads(connection.makefile().readline())


def launch(words):
    store = Store(words) if words["node"] == 0 and not words["alone"] else None
    _connection = None if words["alone"] else ask(words, "node", words["node"], None)[0]
    ranks = [start(words, number, rank) for number, rank in enumerate(words["ranks"])]

    def leave(*_):
        for rank in ranks:
            rank.terminate()
        deadline = time.monotonic() + 2
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.02)
    bad = [rank for rank in ranks if rank.poll()]
    for rank in bad:
        sys.stdout.write(f"  exitcode  : {rank.returncode} (pid: {rank.pid})\n")
        sys.stdout.flush()
    if bad:
        leave()
    del store


def start(words, number, rank):
    """A rank, or its prefork process."""
    argv = [sys.executable, __file__, "prefork" if words["control"] else "rank", json.dumps(dict(words, rank=rank))]
    return subprocess.Popen(argv, start_new_session=True, env=dict(os.environ, LOCAL_RANK=str(number)))


def warm_pool(words):
    """Bear one rank after the other, until one has finished or there are no more positions; the exit code of the last."""
    control, told, number = Path(words["control"]), [], 1

    def pass_on(signum, _frame):
        told.append(signum)
        child.send_signal(signum)

    if (control / "standby").exists():
        (control / f"ready-{os.environ['LOCAL_RANK']}").touch()
        while not (control / "position-1.json").exists():
            if (control / "leave").exists():
                return 0
            time.sleep(0.02)
    if words["alone"]:
        words = positioned(words, control / "position-1.json")
    while True:
        argv = [sys.executable, __file__, "rank", json.dumps(words)]
        # It dies with this process, which has one thread.
        child = subprocess.Popen(argv, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # noqa: PLW1509
        signal.signal(signal.SIGTERM, pass_on)
        code = child.wait()
        write(Path(words["folder"]), f"rank-{words['rank']}.exit.json", {"pid": child.pid, "code": code})
        number += 1
        if code == 0 and not (control / "hold").exists():
            return 0
        position = control / f"position-{number}.json"
        while not position.exists():
            if told or (control / "leave").exists():
                return code if code >= 0 else 128 - code
            time.sleep(0.02)
        words = positioned(words, position)


def positioned(words, position):
    told = json.loads(position.read_text())
    rank = told["ranks"][int(os.environ["LOCAL_RANK"])]
    words = dict(words, rank=rank, folder=told["files"], meet=told["meet"], world=told["world_size"])
    return dict(words, opens=rank == 0, nodes=0)


def write(folder, name, value):
    part = folder / (name + ".part")
    part.write_text(json.dumps(value))
    part.replace(folder / name)


class Rank:
    """One rank."""

    def __init__(self, words):
        self.words, self.rank = words, words["rank"]
        self.leaving = False
        signal.signal(signal.SIGTERM, self.told)
        signal.signal(signal.SIGUSR2, self.cut)
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        self.enter("importing", 0)
        self.write(f"rank-{self.rank}.pid", {"pid": os.getpid(), "start_ticks": ticks})
        self.log = self.path(f"rank-{self.rank}.log").open("a", buffering=1)

    def told(self, *_):
        self.leaving = True

    def cut(self, *_):
        raise ConnectionError("Connection closed by peer")

    def path(self, name):
        return Path(self.words["folder"], name)

    def write(self, name, value):
        write(Path(self.words["folder"]), name, value)

    def enter(self, phase, step):
        self.path(f"rank-{self.rank}.phase").write_bytes(struct.pack("<qqqd", step, PHASES[phase], 0, time.time()))

    def join(self):
        self.store = Store(self.words) if self.words.get("opens") else None
        door = socket.create_server((self.words["local"], 0), backlog=64)
        self.enter("joining", 0)
        _, places = ask(self.words, "rank", self.rank, door.getsockname())
        peers = [socket.create_connection(tuple(places[str(each)])) for each in range(self.rank)]
        peers += [door.accept()[0] for _ in range(self.rank + 1, self.words["world"])]
        self.enter("joined", 0)
        return peers

    def work(self, peers):
        """Until told to leave, until a peer leaves, or for so many steps; how it left."""
        step = 0
        while not self.leaving and (not self.words["steps"] or step < self.words["steps"]):
            step += 1
            self.enter("compute", step)
            self.log.write(f"step {step}\n")
            for peer in peers:
                peer.sendall(b".")
            ready, _, _ = select.select(peers, [], [], 0.05)
            for peer in ready:
                said = peer.recv(4096)
                if b"S" in said:
                    return "stopped"
                if not said:
                    raise ConnectionError("Connection closed by peer")
            time.sleep(0.03)
        return "stopped" if self.leaving else "finished"

    def run(self):
        try:
            peers = self.join()
            result = self.work(peers)
        except OSError as error:
            record = {"kind": "RunFailed", "what": str(error), "seen": "", "fix": "", "exit_code": 5}
            self.write(f"rank-{self.rank}.error.json", record)
            sys.exit(5)
        if self.rank == 0:
            self.write("result.json", {"result": result, "step": 1})
        self.part(peers, b"S" if result == "stopped" else b".")

    def part(self, peers, word):
        """Say the last word, and listen until all others have said theirs: closing earlier could destroy it on its way."""
        for peer in peers:
            try:
                peer.sendall(word)
                peer.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        deadline = time.monotonic() + 2
        while peers and time.monotonic() < deadline:
            ready, _, _ = select.select(peers, [], [], 0.1)
            for peer in ready:
                try:
                    if peer.recv(4096):
                        continue
                except OSError:
                    pass
                peers.remove(peer)


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    if sys.argv[1] == "launcher":
        launch(told)
    elif sys.argv[1] == "prefork":
        sys.exit(warm_pool(told))
    else:
        Rank(told).run()

"""What lies on a machine of a lab: files with given words in them, and who may read and write what.

search(machine, {"HF_TOKEN": "hf_canary"}, since=time.time())       # ["HF_TOKEN in /home/alice/x", ...]
rights(machine, ["/home/alice/gangline"])                           # [["drwx------", "alice", path], ...]
"""

import base64
import json

from tests.lab.settings import lab_folders

PLACES = ("/home", "/root", "/tmp", "/run", "/dev/shm", "/var", "/etc", "/srv", "/opt", "/mnt", "/media")
SEARCH = """
import json, os, stat, sys
told = json.load(sys.stdin)
words = {name: [bytes.fromhex(each) for each in forms] for name, forms in told["words"].items()}
def look(path, status, data):
    for name, forms in words.items():
        if any(form in data for form in forms):
            print(f"{name} in {path}")
def folders():
    for top in told["places"]:
        for folder, below, names in os.walk(top):
            below[:] = [name for name in below if os.path.join(folder, name) not in told["skip"]]
            yield folder, below + names
for folder, names in folders():
    for name in names:
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            if max(status.st_mtime, status.st_ctime) < told["since"]:
                continue
            look(path, status, os.fsencode(name))
            if stat.S_ISLNK(status.st_mode):
                look(path, status, os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as stream:
                    end = b""
                    while piece := stream.read(1 << 22):
                        look(path, status, end + piece)
                        end = piece[-500:]
        except OSError as error:
            print(f"cannot look at {path}: {error}") if error.errno != 2 else None
"""
RIGHTS = """
import json, os, pwd, stat, sys
for top in json.load(sys.stdin):
    for folder, below, names in os.walk(top):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            status = os.lstat(path)
            print(json.dumps([stat.filemode(status.st_mode), status.st_uid, path]))
"""


def search(machine, words, *, since):
    """Every file, name and link on a machine, made or changed after `since`, that has one of the words in it.

    Words count as they are, in hexadecimal, and in base64 wherever they begin.
    """
    told = {
        "words": {name: [form.hex() for form in forms(word)] for name, word in words.items()},
        "places": PLACES,
        "skip": [str(folder) for folder in lab_folders()],
        "since": since - 1,
    }
    out = machine.check(["python3", "-I", "-c", SEARCH], stdin=json.dumps(told), as_root=True)
    return sorted(set(out.splitlines()))


def forms(word):
    """How a word may be written."""
    raw = word.encode()
    # without what the neighbours would have a part in
    shifted = [base64.b64encode(b"x" * by + raw)[4 * bool(by) :][:-4].rstrip(b"=") for by in range(3)]
    return [raw, raw.hex().encode(), *shifted]


def rights(machine, tops):
    """(mode as ls writes it, user number, path) of everything below some folders."""
    out = machine.check(["python3", "-I", "-c", RIGHTS], stdin=json.dumps(list(map(str, tops))), as_root=True)
    return [tuple(json.loads(line)) for line in out.splitlines()]

"""Hosts that do not answer as an agent does: run as `python far_ends.py KIND` in its place."""

import json
import os
import select
import struct
import sys
import time

MAGIC = b"\x00\x01gangline channel 2\x01\x00\n"
HELLO = {
    "version": "0",
    "python": "3",
    "executable": "x",
    "hostname": "h",
    "home": "/",
    "uid": 1,
    "user": "u",
    "boot_id": "b",
}


def say(data):
    while data:
        data = data[os.write(1, data) :]


def frame(header, data=b""):
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    say(struct.pack("!II", len(words), len(data)) + words + data + b"\n")


def greet():
    say(MAGIC)
    frame({"id": 0, "hello": HELLO})


def stay():
    """Say and read nothing, until the other side has gone: a test must leave no process behind."""
    streams = select.poll()
    streams.register(0, select.POLLRDHUP)
    streams.poll(600_000)


def flood_of_text():
    for _ in range(1 << 14):
        say(b"welcome to this host\n" * 3200)  # 1 GB


def flood_of_bytes():
    while True:
        say(os.urandom(1 << 16))


def silence():
    stay()


def slow_twice():
    time.sleep(1.4)  # the way to the host
    left = 1 << 17
    while left:
        part = os.read(0, left)
        if not part:
            sys.exit(1)  # who wrote has gone
        left -= len(part)
    time.sleep(1.4)  # its disk
    greet()
    stay()


def noise_without_end():
    while True:
        say(b"=")
        time.sleep(0.001)


def huge_frame():
    greet()
    say(struct.pack("!II", 1 << 31, 1 << 31))
    flood_of_bytes()


def huge_data():
    greet()
    say(struct.pack("!II", 9, (1 << 18) + 1))
    flood_of_bytes()


def bytes_after_greeting():
    greet()
    flood_of_bytes()


def no_json():
    greet()
    frame(b"]" * 40)


def deep_json():
    greet()
    frame(b"[" * 60000)


def list_for_object():
    greet()
    frame([1, 2, 3])


def greeting_of_wrong_types():
    say(MAGIC)
    frame({"id": 0, "hello": {**HELLO, "home": ["/"]}})


def two_greetings():
    greet()
    greet()


def answers_to_all(make):
    greet()
    number = 0
    while True:
        number += 1
        frame(*make(1))


def more_than_the_window():
    answers_to_all(lambda number: ({"id": number, "data": True}, b"x" * (1 << 16)))


def room_without_end():
    answers_to_all(lambda number: ({"id": number, "ack": 1 << 20}, b""))


def empty_data():
    answers_to_all(lambda number: ({"id": number, "data": True}, b""))


def answers_nobody_waits_for():
    answers_to_all(lambda number: ({"id": 77, "data": True}, b"x" * (1 << 16)))


def two_ends():
    answers_to_all(lambda number: ({"id": number, "end": True}, b""))


def drip():
    greet()
    while True:
        frame({"id": 1, "data": True}, b"x")
        time.sleep(0.05)


def deaf():
    greet()
    stay()


KINDS = {name: value for name, value in globals().items() if callable(value)}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()

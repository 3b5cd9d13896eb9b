"""The page of `gangline ui`, started as it is typed, and asked as a browser asks."""

import contextlib
import gzip
import http.client
import json
import re
import signal
import subprocess
import sys


class Page:
    """A page that was started, and a browser of it."""

    def __init__(self, home, *words):
        argv = [sys.executable, "-m", "gangline.cli.main", "ui", *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})", self.address)
        assert found, (self.address, self.process.stderr.read() if self.process.poll() is not None else "")
        self.home, self.port, self.token = home, int(found[1]), found[2]
        self.origin = f"http://127.0.0.1:{self.port}"
        self.cookie = self.key = ""

    def ask(self, path, *, method="GET", body=None, **headers):
        """Status, headers and body of an answer; a header of None is not sent."""
        told = {"Host": f"127.0.0.1:{self.port}", "Accept-Encoding": "gzip"}
        told |= {"Cookie": self.cookie} if self.cookie else {}
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            data = None if body is None else json.dumps(body).encode()
            told |= {} if data is None else {"Content-Length": str(len(data))}
            for name, value in told.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            content = answer.read()
        self.sent_bytes = len(content)
        if answer.headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        return answer.status, answer.headers, content

    def log_in(self):
        status, headers, _ = self.ask(f"/?token={self.token}")
        assert status == 303, status
        self.cookie, _, self.flags = headers["set-cookie"].partition("; ")
        self.key = headers["location"].removeprefix("/#key=")
        return self

    def json(self, path):
        status, _, content = self.ask(path)
        assert status == 200, (path, content)
        return json.loads(content)

    def order(self, path, body=None, **headers):
        told = {"Origin": self.origin, "Content_Type": "application/json", "X_Gangline_Key": self.key}
        return self.ask(path, method="POST", body=body or {}, **(told | headers))

    def end(self):
        self.process.send_signal(signal.SIGINT)
        try:
            _, said = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, said

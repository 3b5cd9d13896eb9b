"""Runs a function of the tests in this process, for `LabHost.call`: arguments on stdin, result on the last line of stdout."""

import importlib
import json
import sys

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    sys.stdout.write("\n" + json.dumps(getattr(importlib.import_module(module), name)(**json.load(sys.stdin))) + "\n")

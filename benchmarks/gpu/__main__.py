"""GPU tests and GPU benchmarks within given minutes, on a machine that may have no network.

    python -m benchmarks.gpu --list                    what there is, in the order of worth, and what is done
    python -m benchmarks.gpu --minutes 25              go on with what is not done
    python -m benchmarks.gpu --again failed            forget the results of that kind, and run those once more

Without a network there, on a computer that has one (`pip list --format json` of the machine in there.json):

    python -m benchmarks.gpu pack --to pack --there there.json --python 3.12 --piece-mib 60 --cuda 13.0
    python -m benchmarks.gpu unpack --from pack        on the machine; later runs use what was unpacked

Results: .gpu/results.jsonl, a line for each case, and a log beside it for each.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.pack import PackError, needed, pack, unpack
from benchmarks.gpu.runs import DONE, ROOT, Results, probe, run_all

HOME = ROOT / ".gpu"
SITE = HOME / "site"


def main(argv: Sequence[str]) -> int:
    """0 unless a case did not pass, or a pack could not be made or unpacked."""
    if argv[:1] == ["pack"]:
        return _packing(argv[1:])
    if argv[:1] == ["unpack"]:
        return _unpacking(argv[1:])
    usage = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the table and what is done, and run nothing")
    parser.add_argument("--minutes", type=float, default=25.0, help="no case goes on for longer (default 25)")
    parser.add_argument("--results", type=Path, default=HOME / "results.jsonl", help="the file of lines")
    parser.add_argument("--again", choices=DONE, help="run cases with this result once more")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases")
    options = parser.parse_args(argv)
    _use_unpacked()
    results = Results.read(options.results)
    if options.again:
        for name in [name for name, line in results.ends.items() if line["result"] == options.again]:
            results.add({"event": "again", "case": name})
    cases = [case for case in CASES if not options.only or case.name in options.only]
    if options.list:
        for case in cases:
            print(f"{results.state(case):8} {case.name:20} about {case.expected_s:4.0f} s  {case.shows}")
        return 0
    device = probe()
    print("GPUs: " + (", ".join(device["gpus"]) or f"none ({device['why']}); every case is skipped"), flush=True)
    run_all(cases, results, minutes=options.minutes, device=device)
    return 1 if any(results.state(case) in DONE[1:] for case in cases) else 0


def _use_unpacked() -> None:
    """Packages that `unpack` has put beside the results come before those of the machine."""
    if SITE.is_dir():
        folders = [str(ROOT / "src"), str(SITE), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


def _packing(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu pack")
    parser.add_argument("--to", type=Path, required=True, help="folder for the pieces and their list")
    parser.add_argument("--there", type=Path, required=True, help="`pip list --format json` of the machine")
    parser.add_argument("--python", default="3.12", help="the machine's Python (default 3.12)")
    parser.add_argument("--piece-mib", type=float, default=60.0, help="the most that one piece may have")
    parser.add_argument("--cuda", default="", help="of the machine's torch, such as 13.0: other libraries stay here")
    parser.add_argument("--also", nargs="+", default=[], help="packages to compare with, such as trl and liger-kernel")
    options = parser.parse_args(argv)
    words = {"there": options.there, "python": options.python, "piece_mib": options.piece_mib, "cuda": options.cuda}
    try:
        made = pack(options.to, wanted=[*needed(), *options.also], **words)
    except PackError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(made['wheels'])} wheels in {len(made['pieces'])} pieces: {', '.join(made['wheels'])}")
    return 0


def _unpacking(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu unpack")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder with all pieces")
    parser.add_argument("--into", type=Path, default=SITE, help="where packages are put (default .gpu/site)")
    options = parser.parse_args(argv)
    try:
        names = unpack(options.source, into=options.into)
    except PackError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(names)} packages are in {options.into}; python -m benchmarks.gpu finds those in {SITE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Known failures: words that programs write when they fail, with what they mean and what to do.

The table here is of what ranks, launchers and the system of a host write; a supervisor needs it, so it takes no
package to read. Those of libraries, drivers, schedulers and hubs stand in `failures/*.toml`, a file per family.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["cause", "symptom", "error", "echo", "noise"]
"""cause: it names what is wrong. symptom: a general word in which many causes end. error: an exception of which only
the class is known. echo: another rank or host has gone. noise: harmless, and often taken for the cause."""
LEVELS: tuple[Level, ...] = ("cause", "symptom", "error", "echo", "noise")
"""In the order in which they are told; a symptom and an error are told in the order of the log."""

THEN_CHARS = 3000
"""Within so many characters after the beginning of a match its `then` stands."""

RAISED = (
    r"(?<![\w.])((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]?\w{0,60}(?:Error|Exception|Interrupt|Exit)(?::(?!:)|(?=\s*$))"
    r"[^\n]{0,2000})"
)
"""An exception as the last line of a traceback has it, whatever a launcher put before it. Bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A known failure. `means` and `fix` have {0}, {1}, ... for groups of the patterns, {host} for the host."""

    patterns: tuple[str, ...]
    """Regular expressions, all with the same groups. Each begins with plain characters, which are looked for first."""
    means: str
    fix: str
    then: str = ""
    """Plain characters that stand in every match too, after a gap: an expression is tried only where they follow."""
    level: Level = "cause"
    blames: str = ""
    """What is to blame: this rank, another rank, network, host, script, data, software, outside or nobody."""
    confirm: str = ""
    """How to be sure that it is this."""
    explains: tuple[str, ...] = ()
    """Rows that tell of its consequence in the same log: they are told after it, as echoes."""
    avoid: tuple[str, ...] = ()
    """Advice that is often given for it, and is wrong or does harm."""
    since: str = ""
    until: str = ""
    """The first and the last version that is known to write it."""
    sources: tuple[str, ...] = ()
    """Where its words were seen: an address, or `made here:` and the program that failed, with its version."""
    is_verdict: bool = False
    """It is the whole cause: the supervisor names it in the place of the words."""

    @property
    def is_echo(self) -> bool:
        """Who says it is a witness: another rank or host has gone."""
        return self.level == "echo"


# A data table. Most rows are torch's, gloo's, NCCL's and the kernel's own lines, as seen in trials with real hosts or
# in public threads. Where several fit one line, the more exact one counts: the longer match.

_MESH = r"connectFullMesh failed(?:(?!remote=\[).){0,2000}remote=\["

_NO_MODULE = r"ModuleNotFoundError: No module named '(?!\w{1,60}_(?:cuda|C|cpp|ext|ops|kernels)')"
"""A compiled part of a package is no package: another row tells of it."""

SIGNATURES: dict[str, Signature] = {
    # --- ranks that do not find each other
    "mesh-loopback": Signature(
        patterns=(_MESH + r"(127\.[0-9.]{1,12}|::1)\]",),
        then="remote=[",
        means="another rank gave {0} as its address, at which nobody else can reach it",
        fix="gangline sets GLOO_SOCKET_IFNAME: the script and `env` must not set or remove it; "
        "`interface` of a host in cluster.yaml names another one",
        is_verdict=True,
    ),
    "mesh": Signature(
        patterns=(_MESH + r"([0-9A-Fa-f.:]{2,45})\]",),
        then="remote=[",
        means="no connection to another rank at {0}",
        fix="let the hosts of the cluster reach each other on all TCP ports; test every pair: gangline check",
        is_verdict=True,
    ),
    "port-taken": Signature(
        patterns=(r"failed to listen on any local network address\. port: (\d+).{0,200}EADDRINUSE",),
        then="EADDRINUSE",
        means="another program took port {0} of {host}, where the ranks were to meet",
        fix="start again: a port that is free is chosen then; on {host}, ss -ltnp shows who listens",
        is_verdict=True,
    ),
    "no-interface": Signature(
        patterns=(r"Unable to find address for: ([^\s:]{1,32})",),
        means="{host} has no network interface {0} with an address",
        fix="take GLOO_SOCKET_IFNAME out of the script and out of `env`: gangline sets the right one",
        is_verdict=True,
    ),
    "address-in-use": Signature(
        patterns=("Address already in use", "EADDRINUSE"),
        means="another program listens on that port already, perhaps what is left of an earlier start",
        fix="on {host}, ss -ltnp shows who listens; gangline finds a free port at each start: a script must not choose",
    ),
    "clients-missing": Signature(
        patterns=(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined",),
        means="{1} of {2} ranks or launchers met within {0} s: the others never started, or do not reach the head",
        fix="start those that are missing, or let WORLD_SIZE (--nnodes) be the number that is started; look at the "
        "hosts that are missing: gangline check tries every host and pair",
        level="echo",
        explains=("rendezvous",),
    ),
    "rendezvous": Signature(
        patterns=("RendezvousTimeoutError", r"wait timeout after \d+ms, keys: ", "RendezvousConnectionError"),
        means="this launcher waited for those of other hosts, which never came or are gone",
        fix="look at the other hosts; gangline check tries every host and pair",
        level="echo",
    ),
    "no-nccl-interface": Signature(
        patterns=("Bootstrap : no socket interface found", "Bootstrap: no socket interface found"),
        means="NCCL finds no network interface of the name in NCCL_SOCKET_IFNAME (E-ENV-02)",
        fix="take NCCL_SOCKET_IFNAME out of the script and out of `env`: gangline sets the right one for every host",
    ),
    # --- memory
    "gpu-memory": Signature(
        patterns=(r"CUDA out of memory\. Tried to allocate (\d[0-9.]{0,9} [KMGT]iB)",),
        means="a GPU had no room for {0} more",
        fix="lower micro_batch or data.sequence_length, or set activation_checkpointing; gangline plan says what fits; "
        "in an evaluation of transformers: eval_accumulation_steps, or prediction_loss_only if no metric needs logits",
    ),
    "gpu-memory-other": Signature(
        patterns=(
            r"torch\.OutOfMemoryError",
            "CUDA out of memory",
            "CUDA error: out of memory",
            "HIP out of memory",
            "HIP error: out of memory",
            "OutOfMemoryError {2,60}Traceback",
        ),
        means="a GPU had no room left",
        fix="lower micro_batch or data.sequence_length; nvidia-smi shows who else uses the card (E-GPU-02); with room "
        "on the card it may be pinned memory of the host, of which WSL2 gives little: pin_memory=False",
    ),
    "kernel-killed": Signature(
        patterns=(
            r"Memory cgroup out of memory: Killed process (\d+)",
            r"Out of memory: Killed process (\d+)",
            r"oom-kill:constraint=\w{1,40}[^\n]{0,600}?,pid=(\d+)",
        ),
        means="the kernel killed process {0}: its host, or its control group, had no memory left",
        fix="lower micro_batch or data.sequence_length, give the host fewer `slots`, or end other programs there",
    ),
    "host-memory": Signature(
        patterns=(
            "can't allocate memory: you tried to allocate",
            r"MemoryError\b",
            "Cannot allocate memory",
            "std::bad_alloc",
        ),
        means="the host, or a limit of the process, left no memory for what was asked for",
        fix="free -h and ulimit -v tell which: a limit (ulimit, a control group) with memory free is to be raised; "
        "else lower micro_batch or data.sequence_length, give the host fewer `slots`, or end other programs there",
    ),
    "loader-killed": Signature(
        patterns=(r"DataLoader worker \(pid\(?s?\)? ?(\d+)[^)]{0,40}\) is killed by signal: Killed",),
        means="the kernel killed process {0}, which loads data: the host ran out of memory",
        fix="fewer data loader processes in the script, or smaller batches",
    ),
    "shared-memory": Signature(
        patterns=(
            "is killed by signal: Bus error",
            "unable to write to file </torch_",
            r"unable to allocate shared memory\(shm\) for file </torch_",
            "unable to open shared memory object",
            r"Signal 7 \(SIGBUS\)",
            r"exitcode *: -7[ )]",
            r"<Signals.SIGBUS: 7>",
            "Bus error",
        ),
        means="/dev/shm is full: it is too small for data loaders or NCCL (E-LIM-03)",  # noqa: S108 - words
        fix="in a container --shm-size=8g; or fewer data loader processes",
    ),
    # --- ends by a signal
    "killed": Signature(
        patterns=(
            r"Signal 9 \(SIGKILL\) received",
            r"exitcode *: -9[ )]",
            r"Killed\*{0,2}(?=\n|$)",
            r"Killed {5,60}\S",
            r"<Signals.SIGKILL: 9>",
        ),
        level="symptom",
        means="a process was killed by SIGKILL: mostly by the kernel, for memory, else by a person or a job system",
        fix="look into the kernel log of its host (sudo dmesg -T) and at the memory limit of its job or container; "
        "if it was memory of the host: while weights are loaded, safetensors files, low_cpu_mem_usage=True and fewer "
        "processes that load at once; while data are loaded, fewer loader workers and a dataset that is read from disk "
        "or streamed in place of one held in memory whole; in a step, no offload to the CPU, and a lower micro_batch",
    ),
    "crashed": Signature(
        patterns=(
            r"Signal 11 \(SIGSEGV\) received",
            r"Fatal Python error: ",
            r"Segmentation fault",
            r"exitcode *: -11[ )]",
            r"<Signals.SIGSEGV: 11>",
            r"<Signals.SIGABRT: 6>",
        ),
        level="symptom",
        means="native code crashed: a library or driver, seldom the script itself",
        fix="the lines above it name the library; where they do not, start again with PYTHONFAULTHANDLER=1, which "
        "writes the Python line in which it crashed; one version of torch and driver on all hosts: gangline check",
    ),
    "hang-up": Signature(
        patterns=(
            "Received 1 death signal",
            "Received Signals.SIGHUP death signal",
            r"got signal: 1(?!\d)",
            "closing signal SIGHUP",
        ),
        means="the terminal was closed, and torchrun ended with it",
        fix="start it with gangline run: it goes on without a terminal",
    ),
    "told-to-leave": Signature(
        patterns=(
            "Received 15 death signal",
            "Received Signals.SIGTERM death signal",
            r"got signal: 15",
            r"Signal 15 \(SIGTERM\) received",
            "closing signal SIGTERM",
            r"exitcode *: -15[ )]",
        ),
        means="it was told to end, by an order or because another part had failed",
        fix="look at what ended first",
        level="echo",
    ),
    # --- disks and limits
    "no-space": Signature(
        patterns=("No space left on device", r"\[Errno 28\]"),
        means="a disk is full",
        fix="make room there, or set `workdir` of that host to a larger disk; gangline check --only storage",
    ),
    "quota": Signature(
        patterns=("Disk quota exceeded",),
        means="your quota on that file system is used up",
        fix="make room there, or set `workdir` of that host to another disk",
    ),
    "read-only": Signature(
        patterns=(r"Read-only file system(?:: '([^'\n]{1,300})')?",),
        means="a file system takes no writes: it was mounted so, or its disk has failed: {0}",
        fix="write to a folder on a file system that takes writes (findmnt -T FOLDER shows ro or rw); if that one took "
        "writes before, look at its disk: the kernel log of the host says why (sudo dmesg -T)",
    ),
    "open-files": Signature(
        patterns=("Too many open files",),
        means="the process may not open more files (E-LIM-01)",
        fix="raise nofile in /etc/security/limits.conf",
    ),
    "threads": Signature(
        patterns=("can't start new thread", "Resource temporarily unavailable", "pthread_create failed"),
        means="the host allows no more processes or threads (E-LIM-04)",
        fix="raise nproc in /etc/security/limits.conf; in a container --pids-limit",
    ),
    # --- GPUs and NCCL
    "duplicate-gpu": Signature(
        patterns=(r"Duplicate GPU detected ?: rank (\d+) and rank (\d+) both on CUDA device",),
        means="ranks {0} and {1} took the same GPU",
        fix="`slots` as many as GPUs, and torch.cuda.set_device(local rank) in the script",
    ),
    "nccl-versions": Signature(
        patterns=("Mismatched NCCL version detected",),
        means="hosts have different versions of NCCL, and it refuses to start (E-SW-08)",
        fix="one torch on all hosts: NCCL comes with it",
    ),
    "driver-mismatch": Signature(
        patterns=("Driver/library version mismatch",),
        means="NVIDIA's driver was upgraded under the running system: no program can use the GPUs (E-GPU-05)",
        fix="restart the host, and hold the driver's packages back",
    ),
    "driver-old": Signature(
        patterns=("The NVIDIA driver on your system is too old", "CUDA driver version is insufficient"),
        means="the driver is too old for this torch (E-SW-07)",
        fix="a newer driver there, or a torch for an older CUDA on all hosts",
    ),
    "no-kernels": Signature(
        patterns=("no kernel image is available for execution on the device",),
        means="torch (E-SW-06), or an extension that it called, was not compiled for this card",
        fix="python -c 'import torch; print(torch.cuda.get_arch_list(), torch.cuda.get_device_capability())': a card "
        "that is not in the list needs another torch, on all hosts (sm_120: one for CUDA 12.8 or newer); one that is "
        "in it: the extension in the last lines of the traceback was compiled for other cards: compile it anew on a "
        "host with this card, with TORCH_CUDA_ARCH_LIST or the -gencode lines of its build set to it",
    ),
    "gpu-lost": Signature(
        patterns=(
            "GPU is lost",
            "ERROR_GPU_IS_LOST",
            "has fallen off the bus",
            "CUDA error: uncorrectable ECC error",
            "Unable to determine the device handle for GPU",
        ),
        means="a GPU has failed or does not answer on the bus any more (E-GPU-04, E-GPU-06)",
        fix="restart the host; check power cables and slot; if it comes again, take the card out",
    ),
    "device-assert": Signature(
        patterns=("device-side assert triggered",),
        means="an index was out of range on the GPU: mostly a token id or label beyond the model's vocabulary",
        fix="check that tokenizer and model belong together; CUDA_LAUNCH_BLOCKING=1 shows the line",
    ),
    "illegal-access": Signature(
        patterns=("an illegal memory access was encountered",),
        means="a kernel read or wrote outside its memory: a bug of a library, or a failing card",
        fix="CUDA_LAUNCH_BLOCKING=1 shows the line; if it moves from run to run, suspect the card",
    ),
    "no-gpu": Signature(
        patterns=("No CUDA GPUs are available", "Torch not compiled with CUDA enabled", "failed call to cuInit"),
        means="torch sees no GPU there, or was built without CUDA (E-SW-10, E-GPU-09)",
        fix="nvidia-smi has to list the card; install torch from PyTorch's index for CUDA",
    ),
    "other-collective": Signature(
        patterns=("Detected mismatch between collectives on ranks",),
        means="ranks are in different collectives: the script does not do the same on all of them",
        fix="look for a branch on the rank, or on data, around a collective, a save or an evaluation",
    ),
    "nccl-timeout": Signature(
        patterns=("Watchdog caught collective operation timeout",),
        means="this rank waited for others in a collective until its time was over",
        fix="look at the rank that is missing there, and at what ended or stood still first",
        level="echo",
    ),
    "nccl-remote": Signature(
        patterns=("ncclRemoteError", "remote process exited or there was a network error"),
        means="this rank lost its connection to another, which has gone, or the network between them",
        fix="look at what ended first: the first error or exit of the other ranks, mainly on the host whose address "
        "the next line gives; if all of them were well until then, it is the network: link down or errors in dmesg "
        "and ip -s link (InfiniBand: ibstat, perfquery) of both hosts, and gangline check, which tries every pair",
        level="echo",
    ),
    "nccl-system": Signature(
        patterns=("ncclSystemError", "unhandled system error"),
        means="NCCL could not open a connection or get memory from the system; this line does not say which",
        fix="NCCL_DEBUG=WARN on every rank: the first NCCL WARN line names the call; under gangline: gangline check "
        "--only network --only limits",
        level="symptom",
    ),
    # --- software that is missing or does not fit
    "no-module": Signature(
        patterns=(
            _NO_MODULE + r"(\w{1,80}|(?:google|nvidia|azure)\.[\w.]{1,80})'",
            r"No module named ([\w.]{1,80})(?=\n|$)",
        ),
        means="the package {0} is not in the environment of that host (E-SW-01)",
        fix="install it there, the same version on all hosts; or `environment: locked` in cluster.yaml",
    ),
    "import-name": Signature(
        patterns=(r"ImportError: cannot import name '(\w{1,80})' from '([\w.]{1,80})'",),
        means="{1} has no {0}: it is of another version than the one that asks, or {0} is a part of another package",
        fix="the documentation of {1} says since and until which version it has {0}: take versions that belong "
        "together, on all hosts (gangline check --only versions), or import it from the package that has it",
    ),
    "no-library": Signature(
        patterns=(
            r"error while loading shared libraries: ([\w.+-]{1,80})",
            r"ImportError: ([\w.+-]{1,80}): cannot open shared object file",
            r"OSError: ([\w.+-]{1,80}): cannot open shared object file",
        ),
        means="the library {0} is not on that host",
        fix="install it there, or a torch that brings its own",
    ),
    "no-script": Signature(
        patterns=(r"can't open file '([^'\n]{1,200})': \[Errno 2\]",),
        means="there is no {0} on that host",
        fix="write its path as seen from the folder that gangline run brings",
    ),
    "unknown-option": Signature(
        patterns=(r"error: unrecognized arguments: ([^\n]{1,120})",),
        means="the script does not know {0}",
        fix="correct the words after -- of gangline run, or those of --resume-flag",
    ),
    "unused-weights": Signature(
        patterns=("Expected to have finished reduction in the prior iteration before starting a new one",),
        means="some weights had no part in the loss, and DDP waits for their gradients",
        fix="find_unused_parameters=True in the script, or leave these weights out",
    ),
    # --- models and data
    "weights-only": Signature(
        patterns=("Weights only load failed",),
        means="a file holds more than tensors: loading it could run code, and torch.load refuses that (since torch 2.6 "
        "unless it is told otherwise)",
        fix="weights from elsewhere: use a safetensors version of the model; a checkpoint that a run of your own wrote "
        "(optimizer, random state): allow the classes that the words name, torch.serialization.add_safe_globals([...]) "
        "before it is loaded, or a newer version of the library that loads it, which does so itself",
    ),
    "remote-code": Signature(
        patterns=(
            "requires you to execute the configuration file in that repo",
            "requires you to execute the modeling file in that repo",
        ),
        means="the model brings code of its own, which is not run unasked",
        fix="a model that transformers knows; or model.trust_remote_code with a revision, if you trust its author",
    ),
    "gated": Signature(
        patterns=("GatedRepoError", "You are trying to access a gated repo"),
        means="the model or data needs its publisher's consent",
        fix="accept its terms on its page, and set HF_TOKEN where you type gangline",
    ),
    "hub-offline": Signature(
        patterns=("couldn't connect to 'https://huggingface.co'", "LocalEntryNotFoundError", "OfflineModeIsEnabled"),
        explains=("no-such-host", "reset"),
        means="the host does not reach the hub, and has no copy",
        fix="put the model into a folder on this computer and name that: gangline brings it to every host",
    ),
    "other-shape": Signature(
        patterns=(r"size mismatch for\s{1,4}([\w.]{1,200}):\s{1,4}copying a\s{1,4}param",),
        means="the weights are of another model: {0} has another shape",
        fix="let config.json and weights come from one model; or start a new run",
    ),
    "cut-weights": Signature(
        patterns=("Error while deserializing header", "SafetensorError"),
        means="a safetensors file is cut or damaged, or was written wrongly: mostly a download or save was cut off",
        fix="compare its size and sha256 with its source, and fetch or save it once more; a file that is equal to its "
        "source is damaged there; gangline check --same PATH compares it on all hosts",
    ),
    "not-finite": Signature(
        patterns=(r"not finite in (\d+) steps in a row", r"in (\d+) rounds in a row, up to step"),
        then="in a row",
        means="the loss or its gradient was NaN or infinite",
        fix="lower optimizer.learning_rate, set precision: bf16, or look at the samples that events.jsonl names",
    ),
    # --- ssh
    "host-key-refused": Signature(
        patterns=("Host key verification failed",),
        means="ssh refuses the host's key: it is not in known_hosts and nobody could be asked (BatchMode), or, where "
        "the lines above say that it has changed, it is another one (E-ACC-03)",
        fix="not known yet: ssh HOST once by hand, and compare the fingerprint with the one on the host's own "
        "console (under gangline: gangline init); changed: find out why before the new one is taken",
    ),
    "host-key": Signature(
        patterns=("REMOTE HOST IDENTIFICATION HAS CHANGED", r"Host key for \S{1,253} has changed"),
        explains=("host-key-refused",),
        means="the host shows another key than the pinned one: installed anew, or somebody is in between (E-ACC-03)",
        fix="compare the fingerprint on its own console; only if it is the new one: gangline init",
    ),
    "ssh-denied": Signature(
        patterns=(r"Permission denied \(publickey",),
        means="the host refuses your ssh key (E-ACC-05)",
        fix="ssh-copy-id; a key with a passphrase has to be in your agent (ssh-add)",
    ),
    "unknown-name": Signature(
        patterns=(r"Could not resolve hostname ([\w.-]{1,253})(?::[^\n]{1,100})?",),
        means="nobody knows the name {0} (E-ACC-06)",
        fix="compare it letter by letter with the names of the hosts; if it is right, put it into ~/.ssh/config, or "
        "write its address into the cluster file",
    ),
    "no-such-host": Signature(
        patterns=("Name or service not known", "Temporary failure in name resolution"),
        means="a name of a host, or of a web site, leads nowhere from there (E-NAME-05)",
        fix="correct it in /etc/hosts or your DNS; gangline gives ranks addresses: a script must not use names",
    ),
    "ssh-closed": Signature(
        patterns=(r"ssh: connect to host (\S{1,253}) port (\d+): Connection refused",),
        means="{0} is there, and no ssh server listens on its port {1} (E-ACC-07)",
        fix="there: sudo systemctl start ssh (or sshd); or set `port`",
    ),
    "ssh-silent": Signature(
        patterns=(
            r"ssh: connect to host (\S{1,253}) port \d+: (?:Connection timed out|No route to host)",
            r"ssh: connect to host (\S{1,253}) port \d+: (?:Network is unreachable|Host is down)",
        ),
        means="{0} does not answer (E-ACC-01)",
        fix="check that it is on and reachable, or take it out of the cluster file",
    ),
    "torchrun-verdict": Signature(
        patterns=(r"Root Cause \(first observed failure\)",),
        means='what torchrun calls the "root cause" is the end that it saw first, often of a rank that waited',
        fix="look at the other lines here, and at the logs of the other ranks",
        level="noise",
    ),
    # --- witnesses: what a rank says when another one has gone
    "gang-failed": Signature(
        patterns=("told that the gang has failed elsewhere",),
        means="gangline ended this rank because another one had failed",
        fix="look at what ended first",
        level="echo",
    ),
    "reset": Signature(
        patterns=("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused"),
        means="another rank or host has gone, or was not there",
        fix="look at what ended first",
        level="echo",
    ),
    "waited": Signature(
        patterns=(r"Timed out waiting \d+ms for (?:send|recv)",),
        means="another rank or host stands still, or cannot be reached any more",
        fix="look at what stood still first; gangline check tries every pair",
        level="echo",
    ),
    "network-gone": Signature(
        patterns=(
            r"Read error \[[^\]\n]{1,60}\]:\d+: (?:No route to host|Connection timed out|Network is unreachable)",
        ),
        means="another host cannot be reached any more",
        fix="look at that host and the network between: gangline check tries every pair",
        level="echo",
    ),
    "store-gone": Signature(
        patterns=("The client socket has timed out", "DistStoreError", "DistNetworkError"),
        means="the place where ranks meet could not be reached, or others did not come there",
        fix="look at the head and at the hosts that are missing: gangline check tries every pair",
        level="echo",
    ),
}


_RAISED = re.compile(RAISED)
_HEAD = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s])*(?![*?{])")
"""The plain characters with which a regular expression begins; the last one is not optional."""


def verdict(text: str, *, host: str) -> tuple[str, str] | None:
    """What is wrong and what to do, where words in a text are the whole cause; None where none of them is there."""
    for signature in SIGNATURES.values():
        if signature.is_verdict:
            for match in matches(signature, text):
                return filled(signature.means, match, host), filled(signature.fix, match, host)
    return None


def is_witness(text: str) -> bool:
    """Whether words in a text only tell that another rank or host has gone."""
    return any(True for one in SIGNATURES.values() if one.is_echo for _ in matches(one, text))


def last_exception(lines: Sequence[str]) -> str | None:
    """The last exception in lines of a log, with its class; None where there is none."""
    found = (_RAISED.search(line) for line in reversed(lines))
    return next((match[1].strip() for match in found if match), None)


def matches(signature: Signature, text: str) -> Iterator[re.Match[str]]:
    """Every match of every pattern. Most texts have few heads, and a search for plain characters is 20 times faster."""
    for pattern in signature.patterns:
        expression, head, at, then_at = _compiled(pattern), head_of(pattern), 0, -1
        while (at := text.find(head, at)) >= 0:
            if then_at < at and (then_at := text.find(signature.then, at)) < 0:
                break
            if then_at - at > THEN_CHARS:
                at = then_at - THEN_CHARS
            elif match := expression.match(text, at):
                yield match
                at = match.end()
            else:
                at += 1


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Kept: there are more patterns than `re` remembers."""
    return re.compile(pattern, re.DOTALL)


@functools.cache
def head_of(pattern: str) -> str:
    """The plain characters with which every match of a regular expression begins."""
    found = _HEAD.match(pattern)
    return re.sub(r"\\(.)", r"\1", found.group()) if found else ""


def after_head(pattern: str) -> str:
    """The rest of a regular expression behind the plain characters with which it begins."""
    found = _HEAD.match(pattern)
    return pattern[found.end() :] if found else pattern


def filled(words: str, match: re.Match[str], host: str) -> str:
    """A text of a signature with the groups of a match in it."""
    return words.format(*match.groups(""), host=host).removesuffix(": ")

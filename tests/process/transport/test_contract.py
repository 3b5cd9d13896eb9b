"""What every transport promises, whether it has a host or only pretends to."""

import json
import sys
import time
from pathlib import PurePath

import pytest

from gangline.runs.cluster import Host
from gangline.transport.connect import connect
from tests.fakes.transport import Call, FakeTransport, Scripted
from tests.process.transport.sshd import Sshd


class LocalLab:
    """This computer."""

    def __init__(self, folder):
        self.folder = folder / "host"
        self.folder.mkdir()
        self.transport = connect(Host(name="pc1", workdir=str(self.folder), python=sys.executable))

    def teach(self, program, answer):
        """The command that runs a Python program; `answer` says what it does, for those that cannot run it."""
        del answer
        return [sys.executable, "-c", program]


class SshLab(LocalLab):
    """This computer, behind an sshd."""

    def __init__(self, folder):
        self.folder = folder / "host"
        self.folder.mkdir()
        self.transport = Sshd(folder).transport()


class FakeLab:
    """A host in memory."""

    def __init__(self, folder):
        del folder
        self.folder = PurePath("/host")
        self.answers = {}
        self.transport = FakeTransport("pc1", answer=lambda call: self.answers[call.argv[-1]](call))

    def teach(self, program, answer):
        self.answers[program] = answer if callable(answer) else lambda _call: answer
        return ["python", "-c", program]


@pytest.fixture(params=[LocalLab, SshLab, FakeLab], ids=["local", "ssh", "fake"])
def lab(request, tmp_path):
    lab = request.param(tmp_path)
    yield lab
    lab.transport.close()


def test_it_knows_its_host(lab):
    assert lab.transport.host == "pc1"


def test_a_command_leaves_its_output_and_its_code(lab):
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    argv = lab.teach(program, Scripted(returncode=3, stdout="out\n", stderr="err\n"))
    result = lab.transport.run(argv)
    assert (result.host, result.argv, result.returncode) == ("pc1", tuple(argv), 3)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_a_command_ended_by_a_signal_has_a_negative_code(lab):
    program = "import os; os.kill(os.getpid(), 9)"
    assert lab.transport.run(lab.teach(program, Scripted(returncode=-9))).returncode == -9


def test_a_command_reads_what_we_say(lab):
    program = "import sys; data = sys.stdin.buffer.read(); print(len(data), data[:2])"
    argv = lab.teach(program, lambda call: Scripted(stdout=f"{len(call.stdin)} {call.stdin[:2]!r}\n"))
    assert lab.transport.run(argv, stdin=b"ab" * 500_000).stdout == "1000000 b'ab'\n"


def test_variables_are_added_to_those_of_the_host(lab):
    program = "import os; print(os.environ['COLOUR'], bool(os.environ['PATH']))"
    argv = lab.teach(program, lambda call: Scripted(stdout=f"{call.env['COLOUR']} True\n"))
    assert lab.transport.run(argv, env={"COLOUR": "a b'\"$c"}).stdout == "a b'\"$c True\n"


def test_words_arrive_as_they_are(lab):
    word = "; touch canary $(id) `id` \n\t*' \" -o"
    program = "import sys; print(ascii(sys.argv[1:]))"
    argv = lab.teach(program, None)
    if isinstance(lab, FakeLab):
        lab.answers[word] = lambda call: Scripted(stdout=ascii(list(call.argv[3:])) + "\n")
    assert lab.transport.run([*argv, word]).stdout == ascii([word]) + "\n"


def test_lines_are_seen_one_by_one(lab):
    text = "eins\nzwei \u00e4\ndrei"
    program = f"import sys; sys.stdout.buffer.write({text!r}.encode())"
    seen = []
    result = lab.transport.run(lab.teach(program, Scripted(stdout=text)), on_line=seen.append)
    assert seen == ["eins", "zwei \u00e4", "drei"]
    assert result.stdout == text


def test_output_is_text_whatever_comes(lab):
    argv = lab.teach(r"import sys; sys.stdout.buffer.write(b'a\xff')", Scripted(stdout="a\ufffd"))
    assert lab.transport.run(argv).stdout == "a\ufffd"


def test_of_endless_output_the_end_is_kept(lab):
    program = "for n in range(120): print(f'{n:0100000d}')"
    argv = lab.teach(program, lambda _call: Scripted(stdout="".join(f"{n:0100000d}\n" for n in range(120))))
    stdout = lab.transport.run(argv).stdout
    assert len(stdout) < (8 << 20) + 100
    assert stdout.startswith("[the first ")
    assert stdout.endswith("00118\n" + f"{119:0100000d}\n")


def test_a_command_that_takes_too_long_is_ended(lab):
    argv = lab.teach("import time; time.sleep(600)", Scripted(duration_s=600))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"pc1: .* did not end within 0\.5 s"):
        lab.transport.run(argv, timeout_s=0.5)
    assert time.monotonic() - begun < 20


def test_a_program_that_is_not_there_is_a_result(lab):
    if isinstance(lab, FakeLab):
        lab.transport.answer = FakeTransport("pc1").answer
    result = lab.transport.run(["/no/such/program"])
    assert result.returncode == 127
    assert "/no/such/program" in result.stderr


def test_what_is_written_is_read_back_in_pieces(lab):
    path = lab.folder / "deep" / "er" / "file"
    lab.transport.write(path, b"0123456789")
    assert lab.transport.read(path) == b"0123456789"
    assert lab.transport.read(path, offset=2, limit=3) == b"234"
    assert lab.transport.read(path, offset=8, limit=30) == b"89"
    assert lab.transport.read(path, offset=10) == b""
    lab.transport.write(path, b"new")
    assert lab.transport.read(path) == b"new"


def test_reading_what_is_not_there_says_so(lab):
    lab.transport.write(lab.folder / "file", b"")
    for path in (lab.folder / "nothing", lab.folder / "file" / "below", lab.folder):
        with pytest.raises(FileNotFoundError):
            lab.transport.read(path)


def test_names_of_a_folder(lab):
    for name in ("b", "a", "c/deeper"):
        lab.transport.write(lab.folder / "some" / name, b"")
    assert lab.transport.names(lab.folder / "some") == ["a", "b", "c"]
    assert lab.transport.names(lab.folder / "nothing") == []
    assert lab.transport.names(lab.folder / "some" / "a") == []


def test_a_file_is_pushed_and_pulled(lab, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"data")
    lab.transport.push(source, lab.folder / "x" / "file")
    assert lab.transport.read(lab.folder / "x" / "file") == b"data"
    lab.transport.pull(lab.folder / "x" / "file", tmp_path / "back" / "file")
    assert (tmp_path / "back" / "file").read_bytes() == b"data"


def test_a_folder_takes_the_place_of_an_older_one(lab, tmp_path):
    for name, data in (("one", b"1"), ("sub/two", b"22")):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    target = lab.folder / "target"
    lab.transport.write(target / "old", b"")
    lab.transport.push(tmp_path / "source", target)
    assert lab.transport.names(target) == ["one", "sub"]
    assert lab.transport.names(lab.folder) == ["target"]
    lab.transport.pull(target, tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "two").read_bytes() == b"22"


def test_what_is_not_there_cannot_be_pushed_or_pulled(lab, tmp_path):
    with pytest.raises(FileNotFoundError):
        lab.transport.push(tmp_path / "nothing", lab.folder / "target")
    with pytest.raises(FileNotFoundError):
        lab.transport.pull(lab.folder / "nothing", tmp_path / "back")
    assert lab.transport.names(lab.folder) == []
    assert not (tmp_path / "back").exists()


def test_a_fake_remembers_what_was_run():
    fake = FakeTransport("pc1", answer=lambda _call: Scripted(stdout=json.dumps({})))
    fake.run(["ls", "-l"], stdin=b"x", env={"A": "b"})
    assert fake.calls == [Call(argv=("ls", "-l"), stdin=b"x", env={"A": "b"})]

"""Foreign files that are converted: written here, read by the same path as the command."""

from dataclasses import dataclass, field

import pytest

from gangline.config.load import load_job
from gangline.convert.move import MoveQuestion, move_job, write


@dataclass
class Answers:
    """A terminal that gives these answers."""

    answers: list = field(default_factory=list)
    questions: list = field(default_factory=list)

    def ask(self, question):
        self.questions.append(question)
        return self.answers.pop(0) if self.answers else None


@pytest.fixture
def convert(tmp_path):
    """The conversion of a text; `verdicts`: the outcome of each key."""

    def run(text, *overrides, name="foreign.yaml", world_size=2, console=None, beside=(), **options):
        path = tmp_path / name
        path.write_text(text)
        files = [path]
        for other, content in beside:
            (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / other).write_text(content)
            if options.get("named", True):
                files.append(tmp_path / other)
        options.pop("named", None)
        asked = MoveQuestion(
            files=tuple(files), overrides=overrides, output=tmp_path / "job.yaml", world_size=world_size, **options
        )
        return move_job(asked, console=console or Answers()), asked

    return run


@pytest.fixture
def verdicts(convert):
    def run(text, *overrides, **options):
        moved, _ = convert(text, *overrides, **options)
        return {each.key: each.outcome for each in moved.made.verdicts if not each.is_default}

    return run


@pytest.fixture
def loaded(convert):
    """The job that gangline's own loader reads from the converted file."""

    def run(text, *overrides, **options):
        moved, asked = convert(text, *overrides, **options)
        write(moved, asked, force=True)
        return load_job(asked.output, needs_data=False)

    return run

"""What happens in the process of test_generate."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from pathlib import Path

import torch

from gangline.errors import GanglineError
from gangline.runs.job import ChatTemplateJob
from gangline.worker import generate as generate_module
from gangline.worker.export import export
from gangline.worker.generate import open_folder, open_run
from gangline.worker.talk import Interrupted, Sampling, chat, without_controls
from tests.train.tiny import make_job, write_model, write_run, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = Sampling(max_tokens=12, temperature=0)


def model_folder(folder, *, template=None):
    base = Path(folder) / "base"
    if not base.exists():
        write_model(base)
        write_tokenizer(base, chat_template=template)
    return base


def exported(folder, *, data_format="text", merged=False):
    job = make_job(model_folder(folder))
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, format=data_format))
    run, part, _ = write_run(Path(folder) / "root", job)
    export(run, part, Path(folder) / "out", merged=merged)
    return run, part


def form_of_an_export(folder, *, data_format):
    """What the exported folder itself knows of the prompts it was trained on."""
    exported(folder, data_format=data_format)
    return open_folder(Path(folder) / "out").form


def own_template(folder, *, merged):
    """The prompt of a run that was tuned with a chat template of the job, by the run and by its export."""
    job = make_job(model_folder(folder))
    template = ChatTemplateJob(name="mine", text=TEMPLATE)
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, format="chat", chat_template=template))
    run, part, _ = write_run(Path(folder) / "root", job)
    export(run, part, Path(folder) / "out", merged=merged)
    asked = [{"role": "user", "content": "tea?"}]
    speakers = open_run(run, part), open_folder(Path(folder) / "out")
    found = [speaker.tokenizer.decode(speaker.prompt_tokens(asked)[0]) for speaker in speakers]
    config = Path(folder) / "out" / "generation_config.json"
    return found, json.loads(config.read_text())["eos_token_id"] if merged else None


def ask(speaker, text, sampling=GREEDY):
    torch.manual_seed(sampling.seed)
    pieces = []
    whole = speaker.answer([{"role": "user", "content": text}], sampling, pieces.append)
    assert "".join(pieces) == whole
    return whole


def greedy_answer(folder):
    """The answer, and what plain transformers say."""
    speaker = open_folder(model_folder(folder), plain=True)
    tokens = speaker.tokenizer("the tea", return_tensors="pt")["input_ids"]
    ids = speaker.model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=1
    )
    expected = speaker.tokenizer.decode(ids[0, tokens.shape[1] :], skip_special_tokens=True)
    return [ask(speaker, "the tea"), without_controls(expected)]


def answers_by_seed(folder, *, seeds):
    speaker = open_folder(model_folder(folder), plain=True)
    return [ask(speaker, "tea", Sampling(max_tokens=20, temperature=1.0, seed=seed)) for seed in seeds]


def same_model_three_ways(folder, *, merged):
    """A checkpoint, its export, and the base with --adapter: (answers, the base's own answer)."""
    run, part = exported(folder, merged=merged)
    base, out = model_folder(folder), Path(folder) / "out"
    speakers = [open_run(run, part), open_folder(out)]
    if not merged:
        speakers.append(open_folder(base, adapter=out))
    return {"answers": [ask(speaker, "tea") for speaker in speakers], "base": ask(open_folder(base), "tea")}


def forms(folder, *, data_format, template, plain):
    """How the speaker wants to be spoken to, and the prompt that the model gets."""
    base = model_folder(folder, template=template and TEMPLATE)
    tokenizer = open_folder(base).tokenizer
    speaker = generate_module._speaker(open_folder(base).model, tokenizer, data_format=data_format, plain=plain)
    tokens = speaker.prompt_tokens([{"role": "user", "content": "tea?"}])
    return [speaker.form, tokenizer.decode(tokens[0])]


def conversation(folder, *, lines):
    """What a chat says on both streams, and the prompts that the model got."""
    speaker = open_folder(model_folder(folder, template=TEMPLATE))
    prompts = []
    real = speaker.model.generate

    def spy(**arguments):
        prompts.append(speaker.tokenizer.decode(arguments["input_ids"][0]))
        return real(**arguments)

    speaker.model.generate = spy
    answers, talk = io.StringIO(), io.StringIO()
    code = chat([("", speaker)], GREEDY, source=io.StringIO("".join(lines)), answers=answers, talk=talk)
    return {"code": code, "answers": answers.getvalue(), "talk": talk.getvalue(), "prompts": prompts}


def interrupted(folder):
    """Ctrl-C in the middle of an answer, by the signal itself."""
    speaker = open_folder(model_folder(folder), plain=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pieces = []

    def write(text):
        pieces.append(text)
        os.kill(os.getpid(), signal.SIGINT)

    class Letters(generate_module.WordStreamer):
        """Every letter at once, so that there is a middle."""

        def put(self, value):
            if value.dim() == 1:
                self.on_finalized_text("ab")

    kept, generate_module.WordStreamer = generate_module.WordStreamer, Letters
    try:
        speaker.answer([{"role": "user", "content": "tea"}], Sampling(max_tokens=50, temperature=0), write)
    except Interrupted as stop:
        return {"said": str(stop), "pieces": pieces}
    finally:
        generate_module.WordStreamer = kept
    raise AssertionError("it was not interrupted")


def cleaned():
    """What a terminal gets to see of a hostile text."""
    written = []
    streamer = generate_module.WordStreamer(tokenizer=None, write=written.append)
    streamer.on_finalized_text("red \x1b[31m\x9b31m\r tea\n\tpot\x07")
    return written


def main(argv, *, folder, source=None, template=None):
    """generate_main on a command line; {base} is a model folder."""
    base = model_folder(folder, template=template and TEMPLATE)
    out, err = io.StringIO(), io.StringIO()
    kept = sys.stdin
    try:
        sys.stdin = io.StringIO(source or "")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = generate_module.generate_main([word.format(base=base, folder=folder) for word in argv])
    except GanglineError as error:
        return error.to_json()
    finally:
        sys.stdin = kept
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def beside_base(folder, *, merged):
    """A chat with a tuned model and its base, saved; and what each says alone."""
    exported(folder, merged=merged)
    tuned = str(Path(folder) / "out")
    file = Path(folder) / "chat.jsonl"
    argv = [tuned, "--against-base", "--plain", "--max-tokens", "12", "--temperature", "0"]
    done = main(argv, folder=folder, source=f"tea\n/save {file}\n/save {file}\n/save\n")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return done, rows, [ask(open_folder(Path(each)), "tea") for each in (tuned, Path(folder) / "base")]


def without_memory(folder):
    """A chat whose second answer asks for more memory than there can be."""
    speaker = open_folder(model_folder(folder))
    real, calls = speaker.model.generate, []

    def generate(**arguments):
        calls.append(1)
        if len(calls) == 2:
            torch.empty(1 << 50, dtype=torch.uint8)
        return real(**arguments)

    speaker.model.generate = generate
    answers, talk = io.StringIO(), io.StringIO()
    chat([("", speaker)], GREEDY, source=io.StringIO("tea\ncup\ntea\n"), answers=answers, talk=talk)
    return answers.getvalue(), talk.getvalue()

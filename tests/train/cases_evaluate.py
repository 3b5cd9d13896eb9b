"""What happens in the process of test_evaluate."""

import json
import math
import os
from pathlib import Path

import torch

from gangline.errors import GanglineError
from gangline.worker.generate import open_base, open_folder
from gangline.worker.harness import load_tasks, scores
from tests.train.cases_generate import exported, model_folder

ROWS = [
    {"question": "the tea is", "choices": ["hot", "a cold cup", "an otter"], "answer": 0},
    {"question": "the cup is", "choices": ["red and cold", "ice", "big"], "answer": 1},
    {"question": "a bird", "choices": ["flies over the tea", "sings", "is a sled"], "answer": 2},
    {"question": "an otter eats", "choices": ["a fish", "a stone", "the big red sled"], "answer": 0},
]
NEW_TOKENS = 6
HEAD = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
MEAN = "aggregation: mean, higher_is_better: true"
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
    f"doc_to_target: answer\nmetric_list: [{{metric: acc, {MEAN}}}]\n",
    "last": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\ndoc_to_target: ' {{choices[answer]}}'\n"
    "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "said": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{said}}'\n"
    f"generation_kwargs: {{until: ['@@'], max_gen_toks: {NEW_TOKENS}, do_sample: false}}\n"
    f"metric_list: [{{metric: exact_match, {MEAN}}}]\n",
}
"""One task per kind of output that the harness has."""


def write_tasks(folder, answers):
    """Task files over rows beside them; `answers`: the greedy answers of a model, right for every second row."""
    folder.mkdir(exist_ok=True)
    rows = [
        {**row, "said": answer if number % 2 else "something else"}
        for number, (row, answer) in enumerate(zip(ROWS, answers, strict=True))
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{HEAD}{text}")
    return [str(folder / f"{name}.yaml") for name in TASKS]


def make(folder):
    """A model, an adapter over it, and task files."""
    base = model_folder(folder)
    exported(folder)
    speaker = open_folder(base, plain=True)
    return str(base), str(Path(folder) / "out"), write_tasks(Path(folder) / "tasks", greedy(speaker))


def greedy(speaker):
    found = []
    for row in ROWS:
        tokens = speaker.tokenizer(row["question"], return_tensors="pt")["input_ids"]
        asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        ids = speaker.model.generate(input_ids=tokens, pad_token_id=speaker.tokenizer.eos_token_id, **asked)
        found.append(speaker.tokenizer.decode(ids[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


def scored(folder, *, tasks, base=False, **how):
    """The scores of a folder's model, by task and score."""
    os.environ["DISABLE_MULTIPROC"] = "1"
    speaker = open_base(folder=Path(folder)) if base else open_folder(Path(folder))
    found = scores(speaker, load_tasks(tasks), **how)["scores"]
    return {f"{row['task']} {row['metric']}": row for row in found}


def by_hand(folder):
    """The same scores, with plain transformers and the formulas."""
    speaker = open_folder(Path(folder))
    model, tokenizer = speaker.model, speaker.tokenizer

    def surprise(before, after):
        """The log-likelihood of tokens after others."""
        tokens = before + after
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return sum(float(logits[len(before) - 1 + at, token]) for at, token in enumerate(after))

    def of_text(text, continuation):
        before, whole = tokenizer.encode(text), tokenizer.encode(text + continuation)
        return surprise(before, whole[len(before) :])

    with torch.no_grad():
        chosen = [[of_text(row["question"], f" {each}") for each in row["choices"]] for row in ROWS]
        wanted = [each[row["answer"]] for each, row in zip(chosen, ROWS, strict=True)]
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        rolling = [surprise([begin], tokenizer.encode(row["question"])) for row in ROWS]
    right = [each.index(max(each)) == row["answer"] for each, row in zip(chosen, ROWS, strict=True)]
    num_words = sum(len(row["question"].split()) for row in ROWS)
    num_bytes = sum(len(row["question"].encode()) for row in ROWS)
    return {
        "choice acc": sum(right) / len(ROWS),
        "last perplexity": math.exp(-sum(wanted) / len(ROWS)),
        "text word_perplexity": math.exp(-sum(rolling) / num_words),
        "text bits_per_byte": -sum(rolling) / (num_bytes * math.log(2)),
        "said exact_match": 0.5,
    }


def refused(folder, *, tasks):
    """What is said of tasks that cannot be loaded."""
    try:
        load_tasks(tasks)
    except GanglineError as error:
        return [error.what, error.seen, error.fix]
    return ["loaded"]


def no_base(folder):
    try:
        open_base(folder=Path(folder))
    except GanglineError as error:
        return error.what, error.seen
    return "opened"


def no_template(folder, *, tasks):
    try:
        scores(open_folder(Path(folder)), load_tasks(tasks), chat=True)
    except GanglineError as error:
        return error.what
    return "scored"

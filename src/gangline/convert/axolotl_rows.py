"""Axolotl's data sets: which rows they have, what a row looks like, what of it is learned, and how samples are made.

Their own words: axolotl/utils/schemas/datasets.py, axolotl/prompt_strategies/, axolotl/utils/data/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.hugging_face import LAST_BATCH, LOADING, SPEED, source_of
from gangline.convert.outcomes import (
    Foreign,
    Outcome,
    Rule,
    alike,
    as_number,
    drop,
    dropped,
    each,
    equivalent,
    is_off,
    number_to,
    off_or,
    only,
    refuse,
    refused,
    same,
    switch,
    to,
    where_on,
)

_ROWS = {
    "alpaca": "alpaca",
    "completion": "text",
    "pretrain": "text",
    "chat_template": "chat",
}
"""Axolotl's type of a data set -> our format of rows."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_LISTS = ("datasets", "pretraining_dataset")


def _type(value: Any, foreign: Foreign) -> Outcome:
    name = str(value).partition(".")[0]
    if value in _ROWS:
        return same(train_rows(foreign))
    if name in {"bradley_terry", "stepwise_supervised", "chatml", "llama3"} or str(value).endswith(
        ("_transform", ".transform")
    ):
        return refused(lacks.PREFERENCE)
    if name == "chat_template":
        return refused(
            lacks.PREFERENCE if foreign.says("rl") else f"{lacks.ROWS} ({value})", settled_by=("data.format",)
        )
    return refused(f"{lacks.ROWS} ({value})", settled_by=("data.format",))


def _is_files(path: str, foreign: Foreign) -> bool:
    return (
        path.startswith((".", "/", "~"))
        or path.endswith((".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt"))
        or (foreign.folder_has(path))
    )


def _source(item: Mapping[str, Any], foreign: Foreign) -> dict[str, Any]:
    """One data set: where its rows lie."""
    path, files = str(item.get("path") or ""), item.get("data_files")
    if files and (path in {"json", "csv", "parquet", "arrow", "text"} or not path):
        return {"files": files if isinstance(files, list) else [files]}
    return {"files": [path]} if _is_files(path, foreign) else source_of(item)


def _columns(item: Mapping[str, Any]) -> dict[str, Any]:
    """One data set: its format, columns and roles."""
    kind = _ROWS.get(str(item.get("type") or "pretrain"), "text")
    if kind == "text":
        field = item.get("field") or item.get("text_column") or "text"
        return {"format": "text"} | ({} if field == "text" else {"fields": {"text": field}})
    if kind != "chat":
        return {"format": kind}
    fields = {"messages": item.get("field_messages") or "messages"}
    fields |= {
        name: item.get(f"message_property_mappings.{name}") or item.get(f"message_field_{name}") or name
        for name in ("role", "content")
    }
    fields = {role: column for role, column in fields.items() if role != column}
    told = {
        str(name): role.removeprefix("roles.")
        for role, names in item.items()
        if role.startswith("roles.")
        for name in (names if isinstance(names, list) else [names])
    }
    roles = {
        name: role for name, role in (told or (_SHAREGPT_ROLES if "role" in fields else {})).items() if name != role
    }
    return {"format": "chat"} | ({"fields": fields} if fields else {}) | ({"roles": roles} if roles else {})


def train_rows(foreign: Foreign) -> dict[str, Any]:
    """`data.train`, and what all its data sets have in common."""
    items = [item for name in _LISTS for item in foreign.items(name)]
    return _rows(items, "data.train", foreign)


def _rows(items: list[dict[str, Any]], job: str, foreign: Foreign) -> dict[str, Any]:
    if not items:
        return {}
    sources = [_source(item, foreign) for item in items]
    columns = [_columns(item) for item in items]
    if all(each == columns[0] for each in columns):
        shared = {f"data.{key}": value for key, value in columns[0].items()}
        return {job: sources[0] if len(sources) == 1 else sources} | shared
    return {job: [source | column for source, column in zip(sources, columns, strict=True)]}


def _of_data(_value: Any, foreign: Foreign) -> Outcome:
    return same(train_rows(foreign))


def _whole_set(value: Any, foreign: Foreign) -> bool:
    """Whether `data_files` are files of this computer: of a hub data set, gangline takes all or a split."""
    items = [item for name in (*_LISTS, "test_datasets") for item in foreign.items(name)]
    return all("files" in _source(item, foreign) for item in items if item.get("data_files") == value)


def _data_files(value: Any, foreign: Foreign) -> Outcome:
    if _whole_set(value, foreign):
        return same(train_rows(foreign))
    return refused(f"{lacks.SOURCES}: some files of a hub data set", settled_by=("data.train",))


def _evaluation_files(value: Any, foreign: Foreign) -> Outcome:
    if _whole_set(value, foreign):
        return _evaluated(value, foreign)
    return refused(f"{lacks.SOURCES}: some files of a hub data set", settled_by=("data.eval",))


def _evaluated(_value: Any, foreign: Foreign) -> Outcome:
    rows = _rows(foreign.items("test_datasets"), "data.eval", foreign)
    ours = train_rows(foreign)
    if any(ours.get(key) != value for key, value in rows.items() if key != "data.eval"):
        return refused(f"{lacks.EVALUATION}: rows in another form than the training rows")
    return same({"data.eval": rows["data.eval"]})


def _part_for_evaluation(value: Any, _foreign: Foreign) -> Outcome:
    number = as_number(value)
    if not number:
        return dropped("no rows for evaluation")
    if number >= 1:
        return refused(f"{lacks.EVALUATION}: a number of rows", settled_by=("data.eval",))
    return equivalent({"data.eval": number}, "the same part; other rows are drawn")


def _goes_through_template(foreign: Foreign) -> bool:
    return any(str(item.get("type") or "").startswith("chat_template") for item in foreign.items("datasets"))


def template_name(foreign: Foreign) -> str | None:
    """The chat template that the rows go through, where it is one of Axolotl's own."""
    name = foreign.get("chat_template")
    known = (
        name is None or name in {"tokenizer_default", "jinja"} or str(name).startswith("tokenizer_default_fallback_")
    )
    return None if known or not _goes_through_template(foreign) else str(name)


def _template(value: Any, foreign: Foreign) -> Outcome:
    if value == "tokenizer_default":
        return dropped("the model's own, as here")
    if not _goes_through_template(foreign):
        return dropped("no row goes through a chat template; the model keeps its own")
    if value == "jinja":
        return dropped("`chat_template_jinja` has it")
    if foreign.template is not None:
        return same({"data.chat_template": foreign.template})
    return refused(f"{lacks.TEMPLATE} ({value})", settled_by=("data.chat_template",))


def _template_text(value: Any, foreign: Foreign) -> Outcome:
    if not _goes_through_template(foreign):
        return dropped("no row goes through a chat template")
    if foreign.folder_has(str(value)):
        return same({"data.chat_template": str(value)})
    return refused(f"{lacks.TEMPLATE} (write it into a file)", settled_by=("data.chat_template",))


def _own_template(value: Any, foreign: Foreign) -> Outcome:
    if value == foreign.get("chat_template", "tokenizer_default"):
        return dropped("the template of the whole file")
    return refused(f"{lacks.TEMPLATE}: one of its own for a data set", settled_by=("data.chat_template",))


def _learned_roles(value: Any, _foreign: Foreign) -> Outcome:
    names = [_SHAREGPT_ROLES.get(str(name), str(name)) for name in (value if isinstance(value, list) else [value])]
    names = list(dict.fromkeys(names))
    return dropped("the assistant's, as here") if names == ["assistant"] else same({"data.learn.roles": names})


def _ends(value: Any, _foreign: Foreign) -> Outcome:
    if value == "turn":
        return dropped("the end of every turn that is learned, as here")
    return same({"data.learn.end_token": False}) if value == "none" else refused(f"{lacks.MASK} ({value})")


def _thinking(_value: Any, foreign: Foreign) -> Outcome:
    for item in foreign.items("datasets"):
        field, key = item.get("field_thinking"), item.get("template_thinking_key")
        if (field or "reasoning_content") != (key or "reasoning_content"):
            return refused(f"{lacks.ROWS}: thinking under another name than the template's")
    return dropped("the template finds it in the message under this name")


def _on_inputs(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off, as here")
    if all(_columns(item)["format"] == "text" for name in _LISTS for item in foreign.items(name)):
        return dropped("every token of a text is learned anyway")
    return refused(lacks.BOTH_SIDES)


def _overlong(value: Any, foreign: Foreign) -> Outcome:
    words = {"drop": "drop", "truncate": "truncate", "raise": "fail"}
    if value not in words:
        return refused(f"{lacks.TRUNCATION} ({value})")
    if train_rows(foreign).get("data.format") == "text":
        return dropped("texts are split over samples")
    return same({"data.overlong": words[value]})


def _packing(value: Any, _foreign: Foreign) -> Outcome:
    if is_off(value):
        return same({"data.packing": False})
    return equivalent({"data.packing": True}, "as many packed samples in a step; which rows share one differs")


_CHAT_KEYS = (
    "field_messages",
    "message_field_role",
    "message_field_content",
    "message_property_mappings.role",
    "message_property_mappings.content",
    "roles.*",
)

ROWS: Mapping[str, Rule] = {
    **{
        f"{name}.*.{key}": _of_data
        for name in _LISTS
        for key in ("path", "name", "split", "revision", "field", "text_column", *_CHAT_KEYS)
    },
    **{
        f"test_datasets.*.{key}": _evaluated
        for key in ("path", "name", "split", "revision", "type", "field", "ds_type", *_CHAT_KEYS)
    },
    "test_datasets.*.data_files": _evaluation_files,
    "test_datasets.*.*": refuse(lacks.EVALUATION),
    "datasets.*.type": _type,
    "pretraining_dataset.*.type": _type,
    "datasets.*.type.*": refuse(f"{lacks.ROWS} (a form of one's own)"),
    "datasets.*.data_files": _data_files,
    "pretraining_dataset.*.data_files": _data_files,
    "pretraining_dataset.*.skip": off_or(lacks.SOURCES),
    "datasets.*.ds_type": LOADING,
    "datasets.*.trust_remote_code": off_or(lacks.CODE),
    "pretraining_dataset.*.trust_remote_code": off_or(lacks.CODE),
    "datasets.*.preprocess_shards": LOADING,
    "datasets.*.shards": off_or(lacks.SOURCES),
    "datasets.*.shards_idx": off_or(lacks.SOURCES),
    "datasets.*.input_transform": off_or(lacks.CODE),
    "datasets.*.chat_template": _own_template,
    "datasets.*.chat_template_jinja": _own_template,
    "datasets.*.field_tools": only("tools", otherwise=f"{lacks.ROWS} (another column of tools)"),
    "datasets.*.field_thinking": _thinking,
    "datasets.*.template_thinking_key": _thinking,
    "datasets.*.message_property_mappings.*": refuse(f"{lacks.ROWS} (more keys of a message)"),
    "datasets.*.message_field_training": to("data.learn.weight_field"),
    "datasets.*.message_field_training_detail": off_or(lacks.MASK),
    "datasets.*.roles_to_train": _learned_roles,
    "datasets.*.train_on_eos": _ends,
    "datasets.*.train_on_eot": _ends,
    "datasets.*.drop_system_message": off_or(f"{lacks.ROWS} (without their system messages)"),
    "datasets.*.split_thinking": off_or(lacks.MASK),
    **each(
        refuse(lacks.PREFERENCE),
        """
            datasets.*.field_chosen datasets.*.field_rejected datasets.*.step_separator
            datasets.*.max_completion_length datasets.*.train_on_last_step_only datasets.*.logprobs_field
            datasets.*.temperature
        """,
    ),
    "val_set_size": _part_for_evaluation,
    "sequence_len": number_to("data.sequence_length"),
    "eval_sequence_len": lambda value, f: (
        dropped("the samples' own length, as here")
        if alike(value, f.get("sequence_len", 512))
        else refused(lacks.EVALUATION)
    ),
    "excess_length_strategy": _overlong,
    "min_sample_len": lambda value, _f: (
        dropped("as good as none")
        if (as_number(value) or 0) <= 2
        else refused(f"{lacks.SOURCES}: leaving out short rows")
    ),
    "max_prompt_len": drop("of preference tuning only"),
    "sample_packing": _packing,
    "pretrain_multipack_attn": lambda value, f: (
        refused(lacks.LEAKING)
        if is_off(value) and f.says("sample_packing")
        else dropped("rows of a sample do not see each other, as here")
    ),
    "max_packed_sequence_len": off_or(lacks.LEAKING),
    "pretraining_sample_concatenation": off_or(lacks.LEAKING),
    **each(
        drop("how samples are filled"),
        """
            sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method
            sample_packing_eff_est sample_packing_seq_len_multiplier
        """,
    ),
    "sample_packing_sequentially": where_on(lambda _v, _f: equivalent({}, "which rows share a sample differs")),
    "eval_sample_packing": drop("the loss of an evaluation is the mean over its tokens, packed or not"),
    "total_num_tokens": drop("counted anew"),
    "pad_to_sequence_len": drop("padding is never learned nor attended to"),
    "pad_to_multiple_of": drop("padding is never learned nor attended to"),
    "batch_flattening": SPEED,
    "multipack_real_batches": SPEED,
    "curriculum_sampling": off_or(f"{lacks.ORDER} (that of the file)"),
    "group_by_length": off_or(f"{lacks.ORDER} (by length)"),
    "shuffle_merged_datasets": drop("samples are shuffled in every epoch anyway"),
    "shuffle_before_merging_datasets": drop("samples are shuffled in every epoch anyway"),
    "dataset_exact_deduplication": switch("data.deduplicate"),
    "train_on_inputs": _on_inputs,
    "chat_template": _template,
    "chat_template_jinja": _template_text,
    "chat_template_kwargs.*": refuse(f"{lacks.TEMPLATE} (arguments of a template)"),
    "default_system_message": off_or(f"{lacks.TEMPLATE} (another default for the system message)"),
    "eot_tokens": drop("the end of a turn is learned as the template writes it"),
    "use_pose": off_or(lacks.ROWS),
    **each(drop("of PoSE only"), "pose_split_on_token_ids pose_max_context_len pose_num_chunks"),
    **each(
        LOADING,
        """
            dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_num
            dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save dataloader_pin_memory
            dataloader_num_workers dataloader_prefetch_factor remove_unused_columns streaming
            streaming_multipack_buffer_size pretrain_multipack_buffer_size is_preprocess preprocess_iterable
            push_dataset_to_hub dataset_num_shards
        """,
    ),
    "dataloader_drop_last": LAST_BATCH,
}
"""Keys that say what is read and learned."""

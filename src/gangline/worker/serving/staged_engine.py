"""The engine for a model that no host holds: its layers lie on several hosts, and hidden states travel between them.

This is the first stage, which holds the endpoint too. Answers are divided into as many groups as there are stages;
while one group is in a later stage the next one is in this one, so that no stage waits for the whole way. Each stage
has the keys and values of its own layers, and every token passes through every layer once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gangline.errors import GanglineError, RunFailed, UsageError, error_summary
from gangline.runs.gang import split_layers
from gangline.runs.job import ModelJob
from gangline.runs.layout import ADAPTER_CONFIG
from gangline.units import format_bytes
from gangline.worker.generate import Speaker, form_of_folder
from gangline.worker.serving.cache_plan import PART, SHORTEST, UNKNOWN_CONTEXT, CachePlan
from gangline.worker.serving.engine import Engine, Served
from gangline.worker.serving.own_loop import Answer, OwnLoop, Voice
from gangline.worker.serving.passes import CHUNK_TOKENS
from gangline.worker.serving.stage_link import LinkLost, LinkSilent, Message, StageLink, call_stage
from gangline.worker.serving.stage_model import ON_ONE_HOST, StagePasses
from gangline.worker.serving.stage_worker import PreparedStage
from gangline.worker.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def open_engine(served: Served) -> Engine:
    """Divide the layers of a model folder among the stages, and load them. Raises GanglineError."""
    if served.folder is None or served.adapters or (served.folder / ADAPTER_CONFIG).is_file():
        raise UsageError(
            "only a whole model is served over several hosts",
            seen="expected a folder with config.json and safetensors files, without adapters",
            fix="gangline export RUN --merged writes such a folder",
        )
    if not served.stages:
        raise UsageError(
            "a pipeline has two stages at least", seen="no stage behind this one", fix="gangline serve names them"
        )
    crew = _Crew(served)
    try:
        return crew.open()
    except BaseException:
        crew.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage, as the endpoint says it at its start."""

    host: str
    first_layer: int
    last_layer: int
    device: str
    weight_bytes: int
    cache_bytes: int
    free_bytes: int | None


class _Crew:
    """All stages while they are prepared: this one, and the others behind their links."""

    def __init__(self, served: Served) -> None:
        assert served.folder is not None
        self._served, self._folder = served, served.folder
        self._own = PreparedStage(served.folder)
        self._links: list[StageLink] = []

    def open(self) -> Engine:
        served = self._served
        for stage in served.stages:
            self._links.append(call_stage(stage.host, stage.address, stage.port, served.key).beat(self._own.is_well))
        sizes, rows = self._own.sizes(), served.num_parallel
        facts = self._all("facts", num_rows=rows)
        stages = divide(sizes, facts, names=self.names, num_rows=rows, context=served.context)
        words = {"stages": stages, "num_rows": rows, "context": served.context}
        plans = self._all("load", each=[{"number": number} for number in range(len(stages))], **words)
        context = min(plan["context"] for plan in plans)
        caches = self._all("cache", num_rows=rows, context=context)
        plans = [{**plan, **cache} for plan, cache in zip(plans, caches, strict=True)]
        self._join()
        frees = [plan["free_bytes"] for plan in plans if plan["free_bytes"] is not None]
        whole = CachePlan(
            device=plans[0]["device"],
            weight_bytes=sum(plan["weight_bytes"] for plan in plans),
            cache_bytes=sum(plan["cache_bytes"] for plan in plans),
            free_bytes=min(frees) if frees else None,
            context=context,
            num_parallel=rows,
        )
        chain = StageChain(self._own.passes, list(zip(self.names[1:], self._links, strict=True)))
        return StagedLoop(self._voices(), chain=chain, plan=whole, served=served, stages=self._told(plans, stages))

    @property
    def names(self) -> list[str]:
        """The hosts, this one first."""
        return [self._served.host, *(stage.host for stage in self._served.stages)]

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _voices(self) -> dict[str, Voice]:
        tokenizer = load_tokenizer(ModelJob(path=str(self._folder)))
        form = form_of_folder(self._folder, tokenizer)
        return {self._served.name: Voice(speaker=Speaker(model=self._own.model, tokenizer=tokenizer, form=form))}

    def _told(self, plans: Sequence[dict[str, Any]], stages: Sequence[int]) -> list[StagePlan]:
        found, begin = [], 0
        for name, plan, layers in zip(self.names, plans, stages, strict=True):
            known = {key: plan[key] for key in ("device", "weight_bytes", "cache_bytes", "free_bytes")}
            found.append(StagePlan(host=name, first_layer=begin, last_layer=begin + layers - 1, **known))
            begin += layers
        return found

    def _all(self, do: str, *, each: Sequence[dict[str, Any]] | None = None, **words: Any) -> list[dict[str, Any]]:
        """Have all stages do the same at the same time. Raises the first error of one, with its host."""
        asked = [{**words, **own} for own in each or [{}] * len(self.names)]
        for link, name, words_of in zip(self._links, self.names[1:], asked[1:], strict=True):
            _send(link, {"do": do, **words_of}, name=name)
        try:
            own = getattr(self._own, do)(**asked[0])
        except GanglineError as error:
            raise _at(self.names[0], error) from error
        except Exception as error:  # any that an architecture raises where it is cut
            log.exception("the first stage failed")
            raise RunFailed(f"{self.names[0]}: a stage failed", seen=error_summary(error), fix=ON_ONE_HOST) from error
        return [own, *(_reply(link, name) for link, name in zip(self._links, self.names[1:], strict=True))]

    def _join(self) -> None:
        """Connect each stage with the one behind it, and begin."""
        stages = self._served.stages
        for number in range(len(stages) - 1):
            following, place = self._links[number + 1], stages[number + 1]
            _send(following, {"do": "accept"}, name=place.host)
            _send(self._links[number], {"do": "link", **asdict(place)}, name=stages[number].host)
            _reply(self._links[number], stages[number].host)
            _reply(following, place.host)
        for link, name in zip(self._links, self.names[1:], strict=True):
            _send(link, {"do": "begin"}, name=name)


def _send(link: StageLink, head: dict[str, Any], *, name: str) -> None:
    try:
        link.send(head)
    except LinkLost as error:
        raise _missed(name, error) from None


def _reply(link: StageLink, name: str) -> dict[str, Any]:
    try:
        head, _ = link.receive()
    except LinkLost as error:
        raise _missed(name, error) from None
    if "error" in head:
        raise _at(name, GanglineError.from_json(head["error"]))
    return head


def _at(name: str, error: GanglineError) -> GanglineError:
    return type(error)(f"{name}: {error.what}", seen=error.seen, fix=error.fix)


def _missed(name: str, error: LinkLost) -> RunFailed:
    how, why = (
        ("hangs", "stopped, stuck, swapping") if isinstance(error, LinkSilent) else ("has gone", "off, out of memory")
    )
    return RunFailed(
        f"{name} {how}, and with it its layers of the model",
        seen=str(error) or "its connection has ended",
        fix=f"look at that host ({why}?), then start it again: gangline serve",
    )


def divide(
    sizes: dict[str, Any],
    facts: Sequence[dict[str, Any]],
    *,
    names: Sequence[str],
    num_rows: int,
    context: int | None,
) -> list[int]:
    """Layers of each stage: by the speed of its products, as far as its memory allows it.

    Where no context is asked for, one that is shorter than the model's is taken before the model is refused. Raises
    UsageError.
    """
    wanted = context or min(sizes["limit"] or UNKNOWN_CONTEXT, UNKNOWN_CONTEXT)
    most: list[int] = []
    for tokens in dict.fromkeys((wanted, wanted if context else min(wanted, SHORTEST))):
        layer = sizes["layer_bytes"] + sizes["token_bytes"] * (tokens + 1) * num_rows
        ends = [0] * len(facts)
        ends[0] += sizes["first_bytes"]
        ends[-1] += sizes["last_bytes"]
        rooms = [fact["free_bytes"] * PART - end for fact, end in zip(facts, ends, strict=True)]
        most = [int(min(sizes["layers"], max(0.0, room / layer))) for room in rooms]
        found = split_layers([fact["layer_s"] for fact in facts], sizes["layers"], most=most)
        if found is not None:
            return list(found)
    if len(facts) > sizes["layers"]:
        raise UsageError(
            f"a model of {sizes['layers']} layers cannot be divided among {len(facts)} hosts",
            seen="expected a layer for each host at least",
            fix="name fewer: --on HOST",
        )
    rooms_told = ", ".join(
        f"{name} {format_bytes(fact['free_bytes'])} free, {layers} layers"
        for name, fact, layers in zip(names, facts, most, strict=True)
    )
    raise UsageError(
        "the model does not fit into the memory of these hosts together",
        seen=f"{sizes['layers']} layers of {format_bytes(sizes['layer_bytes'])} and their cache; {rooms_told}",
        fix="add hosts, a shorter --context, a smaller --parallel, or end what else runs there",
    )


class StageChain:
    """Passes through all stages. See `Passes`; `begin` and `take` are its two halves."""

    together: bool = True
    chunk_tokens: int | None = CHUNK_TOKENS

    def __init__(self, own: StagePasses, links: Sequence[tuple[str, StageLink]]) -> None:
        self._own, self._links = own, links
        self._results: queue.Queue[Message | None] = queue.Queue()
        self.broken: GanglineError | None = None
        self._closing = False
        for name, link in links:
            threading.Thread(target=self._read, args=(name, link), daemon=True).start()

    @property
    def num_stages(self) -> int:
        """This one and the others."""
        return len(self._links) + 1

    def open(self) -> int:
        """See `Passes`."""
        slot = self._own.open()
        self._send({"do": "open"})
        return slot

    def close(self, slot: int) -> None:
        """See `Passes`."""
        self._own.close(slot)
        self._send({"do": "close", "slot": slot})

    def step(self, model: Any, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> torch.Tensor:  # noqa: ARG002
        """See `Passes`."""
        self.begin(slots, fresh)
        return self.take()

    def begin(self, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> None:
        """Pass tokens through this stage, and hand them on."""
        made = self._own.pass_tokens(list(slots), [list(each) for each in fresh])
        self._send({"do": "pass", "slots": list(slots), "counts": [len(each) for each in fresh]}, made)

    def take(self) -> torch.Tensor:
        """The logits of the oldest pass that was begun: (slots, vocabulary). Raises RunFailed."""
        head, logits = self._reply()
        if logits is None:
            raise RunFailed(
                f"{self._links[head['stage'] - 1][0]}: a pass failed in its layers",
                seen=head["error"],
                fix="where its memory is used up: fewer answers at a time (--parallel), or a shorter --context",
            )
        return logits

    def end(self) -> None:
        """End all stages."""
        self._closing = True
        for _, link in self._links:
            link.close()

    def _send(self, head: dict[str, Any], tensor: torch.Tensor | None = None) -> None:
        name, link = self._links[0]
        try:
            link.send(head, tensor)
        except LinkLost as error:
            self._break(_missed(name, error))
        if self.broken is not None:
            raise self.broken

    def _reply(self) -> Message:
        message = None if self.broken else self._results.get()
        if message is None:
            raise self.broken or _missed("a stage", LinkLost())
        return message

    def _read(self, name: str, link: StageLink) -> None:
        try:
            while "lost" not in (message := link.receive())[0]:
                self._results.put(message)
        except LinkLost as error:
            self._break(_missed(name, error))
        else:  # a neighbour of it, on which it waits
            head = message[0]
            kind = LinkSilent if head["silent"] else LinkLost
            self._break(_missed(self._links[head["lost"] - 1][0], kind(f"seen by {name}: {head['seen']}")))

    def _break(self, error: GanglineError) -> None:
        if self.broken is None and not self._closing:
            self.broken = error
        self._results.put(None)


class StagedLoop(OwnLoop):
    """Answers in as many groups as there are stages, each on its way through them."""

    def __init__(
        self, voices: dict[str, Voice], *, chain: StageChain, plan: CachePlan, served: Served, stages: list[StagePlan]
    ) -> None:
        self._chain, self._stages = chain, stages
        self._flying: deque[tuple[list[Answer], list[list[int]]]] = deque()
        self._begun = 0
        super().__init__(voices, passes=chain, plan=plan, num_waiting=served.num_waiting)

    @property
    def plan(self) -> dict[str, Any]:
        """See `Engine.plan`; `stages`: what each of them has."""
        return {**super().plan, "stages": [asdict(stage) for stage in self._stages]}

    @property
    def broken(self) -> GanglineError | None:
        """See `Engine.broken`."""
        return self._chain.broken

    def close(self) -> None:
        """See `Engine.close`."""
        super().close()
        self._chain.end()

    def _turn(self) -> None:
        try:
            self.seat()
            over = {answer for answer in self.active if answer.cancelled}
            while len(self._flying) < self._chain.num_stages and (group := self._next_group()):
                over.update(self._begin(group))
            if self._flying:
                over.update(self._land())
            flying = {answer for answers, _ in self._flying for answer in answers}
            self.take_out(over - flying)
        except GanglineError as error:  # a stage has gone: there is no answer any more
            for answer in self.active:
                answer.slot = None
            self.fail(self.active, error)
            self.active = []
            self._flying.clear()

    def _next_group(self) -> list[Answer]:
        """Answers that wait for a pass, of those that wait longest: next tokens, or parts of prompts."""
        flying = {answer for answers, _ in self._flying for answer in answers}
        ready = [answer for answer in self.active if not (answer.cancelled or answer.over or answer in flying)]
        if not ready:
            return []
        first = min(ready, key=lambda answer: answer.last_pass)
        alike = [answer for answer in ready if (answer.num_fresh > 1) == (first.num_fresh > 1)]
        alike.sort(key=lambda answer: answer.last_pass)
        return alike[: -(-len(self.active) // self._chain.num_stages)]

    def _begin(self, group: list[Answer]) -> list[Answer]:
        self._begun += 1
        share = self.prompt_share([answer for answer in group if answer.num_fresh > 1])
        part = [answer.next_tokens(share) for answer in group]
        for answer in group:
            answer.last_pass = self._begun
        try:
            self._chain.begin([answer.slot for answer in group if answer.slot is not None], part)
        except Exception as error:  # out of memory in this stage: these answers fail, not all
            if self._chain.broken is not None:
                raise self._chain.broken from error
            log.exception("answers failed")
            return self._ended(self.fail(group, error))
        self._flying.append((group, part))
        return []

    def _land(self) -> list[Answer]:
        answers, part = self._flying.popleft()
        try:
            with torch.inference_mode():
                logits = self._chain.take()
                likeliest = logits.argmax(dim=-1).tolist()
        except Exception as error:
            if self._chain.broken is not None:
                self._flying.appendleft((answers, part))
                raise self._chain.broken from error
            log.exception("answers failed")
            return self._ended(self.fail(answers, error))
        going = [number for number, answer in enumerate(answers) if not answer.cancelled]
        return self._ended(
            self.count_passed(
                [answers[number] for number in going],
                [part[number] for number in going],
                logits[going],
                [likeliest[number] for number in going],
            )
        )

    def _ended(self, answers: list[Answer]) -> list[Answer]:
        for answer in answers:
            answer.over = True
        return answers

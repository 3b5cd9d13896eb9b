"""Names of runs: an adjective, an animal of the team, a number, such as calm-otter-7."""

from __future__ import annotations

import re
from collections.abc import Collection
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    able agile amber ample arctic bold brave bright brisk calm candid clear clever cool crisp daring deep early
    eager easy fair fast firm fleet fond fresh gentle glad golden grand happy hardy honest ivory jolly keen kind
    late light lively loyal lucky lunar mellow merry mild misty modest neat nimble noble north open patient plain
    polar proud quick quiet rapid ready red royal rustic sharp shy silent silver simple sleek smart snowy snug
    solar solid spry steady still stout strong sturdy sunny swift tidy trim true vivid warm white wild winter wise
    young
    """
)

NOUNS = _words(
    """
    alder aspen badger bear beaver birch bison brook caribou cedar clover condor coyote crane creek curlew deer
    dove eagle elk ermine falcon fern finch fjord fox glacier goose grouse hare harp hawk heron husky ibex jay
    kestrel lake lark larch lemming lichen loon lynx marmot marten meadow mink moose moss narwhal otter owl petrel
    pika pine plover puffin rabbit raven reindeer river robin salmon seal sled snipe sparrow spruce stag stork
    swallow swan tern thistle thrush trout tundra vole walrus weasel whale willow wolf wren
    """
)

PATTERN = re.compile(r"[a-z]+-[a-z]+-[1-9][0-9]*")
"""What an id looks like; anything else in the folder of runs is not a run."""


def new_id(taken: Collection[str], dice: Random | None = None) -> str:
    """An id that is not in `taken`. The number grows with the runs there are, so that ids stay short."""
    dice = dice or Random()
    highest = 9
    while True:
        for _ in range(20):
            candidate = f"{dice.choice(ADJECTIVES)}-{dice.choice(NOUNS)}-{dice.randint(1, highest)}"
            if candidate not in taken:
                return candidate
        highest *= 10

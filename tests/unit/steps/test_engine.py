"""What does a plan's strategy has to be on every host before a run is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.inventory.facts import Inventory
from gangline.planning.plan import Plan, make_plan
from gangline.runs.cluster import Cluster, Environment
from gangline.runs.job import StrategyJob
from gangline.steps.engine import require_engine
from tests.unit.steps.test_forecast import JOB

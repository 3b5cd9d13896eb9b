"""Names that the agent shares with the rest; written by `python -m gangline.runs.layout`."""

PHASES = (
    "importing",
    "joining",
    "joined",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluate",
    "save",
    "ended",
)
AGENT_RECORD = "agent.json"
STATUS = "status.json"
EXIT = "exit.json"
RESTING = "resting.json"
NEXT = "next.json"
HANDED = "handed.json"
CONSOLE_LOG = "console.log"
SUPERVISOR_LOCK = "supervisor.lock"
STATE = "state.json"
SCHEMA_VERSION = "1.0"

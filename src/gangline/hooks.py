"""Progress and an orderly end for scripts of your own: see docs/own-scripts.md. Imports nothing else of gangline."""

from gangline.agent.supervise.script_hooks import save_now, should_stop, step

__all__ = ["save_now", "should_stop", "step"]

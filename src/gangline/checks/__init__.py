"""Is it good? One family of checks per file; each looks at the inventory and returns findings. Pure."""

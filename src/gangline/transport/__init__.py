"""How do I do it there? Transports to hosts. Only this folder spawns processes for hosts."""

"""How is it going? Reading a run's files while they grow, and showing them in a terminal."""

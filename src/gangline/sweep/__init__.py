"""Which of many runs of one job is the best: points, their runs on free hosts, their ranking."""

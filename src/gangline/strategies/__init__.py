"""Ways to train over several ranks, a folder each: `plan.py` is pure, `train.py` is the half with torch."""

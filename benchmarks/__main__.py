"""`python -m benchmarks`: the trainer benchmark. The other benchmarks are started by their own names."""

import sys

from benchmarks.trainer import main

sys.exit(main())

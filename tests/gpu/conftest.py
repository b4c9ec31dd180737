"""What GPU tests take from the engine tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))

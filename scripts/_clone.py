"""Make a script import the packages of the clone it stands in.

Every command in this folder imports this module before `configs`, `data`, `model`, `parallel` or
`training`. Then it uses those of its own clone, from any working directory, even if another copy is
installed or on PYTHONPATH.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

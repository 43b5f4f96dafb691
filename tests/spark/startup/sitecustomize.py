"""Take PySpark from its installed modules, whose bytecode is kept, not from the zip file that Spark puts before them.

Python imports this module at its start, because tests put this folder into PYTHONPATH. Spark starts a Python for each
step of a plan. From the zip, each compiles all of PySpark again: half a second of processor time.
"""

from __future__ import annotations

import sys

sys.path[:] = [path for path in sys.path if not ("pyspark" in path and path.endswith((".zip", ".jar")))]

"""Run a module as `__main__` in a child process whose operations on files are counted and struck.

    $ python -P -m tests.faults.child MODULE ARGUMENT …    in place of `python -P -m MODULE …`

The parent is in a `FileOperations`, which starts its children like this.
"""

import runpy
import sys

from tests.faults.file_operations import FileOperations

if __name__ == "__main__":
    module = sys.argv[1]
    del sys.argv[0]
    with FileOperations.of_parent():
        runpy.run_module(module, run_name="__main__", alter_sys=True)

"""The size of the package, held: lines of each folder, and functions on two routes.

$ python -m tests.budget            # every figure beside its limit
$ python -m tests.budget export     # the functions that `enginery export` runs, by file

`budget.json` has a list of limits for each figure, each with the reason why it was set; the last
one holds.
"""

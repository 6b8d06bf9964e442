"""The command line: one subcommand per stage, each in the module of its name.

    $ enginery run
    $ enginery export org/name --task text-classification --out build/name
    $ enginery validate build/name --profile batch=1:8:32,sequence=8:64:128

Exit status: 0 for success, 1 if a check failed, 2 for an error, 3 if rows of predict have no
result, 130, 143 and 129 if SIGINT, SIGTERM or SIGHUP ended the command.
"""

from enginery.cli.app import COMMANDS, commands, main

__all__ = ["COMMANDS", "commands", "main"]

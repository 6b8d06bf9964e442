"""A progress for tests."""

from enginery.core.progress import Silent


class Said(Silent):
    """A progress that keeps what it was told."""

    def __init__(self):
        self.messages = []

    def say(self, message):
        self.messages.append(message)

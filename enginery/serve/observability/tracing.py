class Tracing:
    @classmethod
    def from_environment(cls): return None

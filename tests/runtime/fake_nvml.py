"""A fake of NVML, the driver's library."""

from enginery.runtime.nvml import _Process


class Function:
    def __init__(self, call):
        self._call = call
        self.restype = None

    def __call__(self, *arguments):
        return self._call(*arguments)


class FakeNvml:
    """NVML; the functions in `failing` return an error."""

    def __init__(self, *, failing=(), pids=()):
        self.failing = failing
        self.pids = pids
        self.millijoules = 5_000
        self.shutdowns = 0
        self.nvmlErrorString = Function(lambda code: b"Not Supported")

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return Function(lambda *arguments: self._do(name, arguments))

    def _do(self, name, arguments):
        if name in self.failing:
            return 3
        if name == "nvmlShutdown":
            self.shutdowns += 1
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            arguments[1]._obj.value = self.millijoules
        if name == "nvmlDeviceGetMemoryInfo":
            memory = arguments[1]._obj
            memory.total, memory.free, memory.used = 80 << 30, 77 << 30, 3 << 30
        if name == "nvmlDeviceGetUtilizationRates":
            arguments[1]._obj.gpu, arguments[1]._obj.memory = 63, 20
        if name == "nvmlDeviceGetTemperature":
            assert arguments[1] == 0  # NVML_TEMPERATURE_GPU
            arguments[2]._obj.value = 41
        if name == "nvmlDeviceGetPowerUsage":
            arguments[1]._obj.value = 213_500
        if name == "nvmlDeviceGetComputeRunningProcesses_v3":
            capacity = arguments[1]._obj
            too_small = len(self.pids) > capacity.value
            capacity.value = len(self.pids)
            if too_small:
                return 7
            for index, (pid, size) in enumerate(self.pids):
                arguments[2][index] = _Process(pid, size, 0, 0)
        return 0

"""Devices and a device state of round figures, for tests in which no particular GPU is meant."""

from quantbench.device.spec import DeviceSpec, DeviceState

A100 = DeviceSpec(
    "a100-test", "cuda", 108, 1410, 40 * 2**20, 164 * 2**10, 80 * 2**30, 2039, {"bf16": 312}, (8, 0)
)
CPU = DeviceSpec("cpu-test", "cpu", 1, 3000, 2**25, 0, 2**34, 50, {"fp32": 0.1})
STATE = DeviceState(sm_clock_mhz=1410.0)

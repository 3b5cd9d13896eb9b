"""GPU entries: a made-up card, in the columns of gangline's own table (src/gangline/catalog/gpu_specs.py)."""

from __future__ import annotations

from gangline.catalog.gpu_specs import GpuRow

ROWS = (
    GpuRow(
        name="Example Accelerator X1",  # as NVML reports it, without "NVIDIA "
        architecture="ada",
        num_sms=100,
        boost_mhz=2000,
        memory_gb=32,
        visible_mib=None,
        bandwidth_gb_s=800,
        power_w=300,
        stated_tflops=None,  # computed from SMs and clock
        measured_tflops=None,
        source="unverified",
    ),
)

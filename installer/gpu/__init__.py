"""The GPUs of this machine: what NVML and nvidia-smi report, as one set of facts."""

import threading

from installer.gpu import nvml, smi
from installer.gpu.facts import Gpu, GpuFacts, GpuProcess, merge


def collect() -> GpuFacts:
    """Ask both at once; NVML wins where they disagree. Never raises; returns within eight seconds even if the driver
    hangs."""
    answers: dict[str, GpuFacts] = {}
    sources = {"nvml": nvml.query, "smi": smi.query}

    def ask(name: str) -> None:
        answers[name] = sources[name]()

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(nvml.BUDGET + 0.8)
    late = GpuFacts(nvml_error="NVML: no answer", smi_error="nvidia-smi: no answer")
    return merge(*(answers.get(name, late) for name in sources))


__all__ = ["Gpu", "GpuFacts", "GpuProcess", "collect", "merge"]

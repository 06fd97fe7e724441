"""What the engine's self-test says, for the catalogue: the engine knows no other language than English, and `atoll
doctor` recognises its sentences. tests/appliance/cli/operate/test_doctor.py sees that they are still these."""

from installer.base.i18n import foreign

SAID = (
    foreign("All {total} kernel checks passed in {seconds} s: this GPU is fit to serve."),
    foreign(
        "All {total} kernel checks passed in {seconds} s ({skipped} need a newer GPU): this GPU is fit to serve."
    ),
    foreign("{failed} of {total} checks failed: {names} computed something other than plain arithmetic does."),
    foreign("{failed} of {total} checks failed: {names} could not be compiled or run."),
    foreign("{failed} of {total} checks failed: {names} found too little free GPU memory."),
    foreign("{failed} of {total} checks failed: {names} made the GPU refuse every later call."),
    foreign("{failed} of {total} checks failed: {names} gave no answer."),
    foreign(
        "Do not serve with this GPU. Run it again: if the same checks fail, update the NVIDIA driver, and report the "
        "output of 'atoll doctor --json'; if others fail each time, suspect the GPU's memory."
    ),
    foreign(
        "Read the reasons above. Kernels are compiled into $TRITON_CACHE_DIR (~/.cache/atoll/triton) by way of "
        "$TMPDIR: both must be writable. If they are, report the output of 'atoll doctor --json'."
    ),
    foreign(
        "Stop what else uses the GPU (nvidia-smi lists it; 'atoll stop' stops an installed service), then run it "
        "again."
    ),
    foreign(
        "Run it again. If it happens again, look for 'Xid' in the kernel's log (dmesg), and restart the machine or "
        "reset the GPU."
    ),
    foreign(
        "See whether nvidia-smi answers, and look for 'Xid' in the kernel's log (dmesg); restart the machine if it "
        "does not. A very slow disk can be the cause too: --time-limit gives more time."
    ),
    foreign("There is no usable GPU here: no NVIDIA driver is loaded."),
    foreign(
        "On a machine with an NVIDIA GPU, install its driver until nvidia-smi lists the GPU. Without one, 'atoll "
        "serve' uses the CPU."
    ),
    foreign("No GPU can be used: this PyTorch ({version}) is a build for CPUs."),
    foreign("Install Atoll with the PyTorch build for CUDA."),
    foreign("No GPU can be used: {why}"),
    foreign("the driver shows no GPU to this process."),
    foreign(
        "See whether nvidia-smi lists the GPU; this PyTorch needs a driver for CUDA {cuda}. A variable "
        "CUDA_VISIBLE_DEVICES hides GPUs."
    ),
    foreign("This GPU is too old: {name} has compute capability {capability}, and {needed} is needed."),
    foreign("Use a newer GPU, or 'atoll serve --device cpu'."),
    foreign("{version}, built for CPUs only"),
    foreign("{version}, built for CUDA {cuda}"),
    foreign("{version}; its library libcuda.so.1 cannot be loaded"),
    foreign("weights only: units for it need compute capability 8.9"),
    foreign("{free} of {total} GiB"),
    foreign("not measured: {why}"),
    foreign("{seconds} s of waiting (none when kernels are at hand)"),
    foreign(
        "Python {python} s, PyTorch {torch} s, Triton {triton} s, GPU {gpu} s, list of kernels {jobs} s, rates "
        "{rates} s, plain arithmetic {twins} s, waiting for compilers {waiting} s, kernels {kernels} s"
    ),
    foreign("the result holds NaN, infinity or another shape"),
    foreign("no answer within {seconds} s"),
    foreign("needs fp8"),
    foreign("compute capability"),
    foreign("free memory"),
    foreign("memory bandwidth"),
    foreign("bf16 products"),
    foreign("compilation"),
    foreign("driver"),
    foreign("yes"),
)

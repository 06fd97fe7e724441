"""The kernel self-test: every GPU kernel against its plain reference on this machine's GPU, in seconds.

    python -m engine.selftest [--json]        what `atoll doctor` runs

    __main__    starts the tests in a child process, passes its lines on, and ends it after a time limit, so that a GPU
                that hangs or loses its state is reported, too
    run         the child: facts of the machine, then each check
    jobs        the kernels that will be needed, listed for known GPUs, so that compilers can start at once
    nvml        which GPU is here, asked of the driver before PyTorch is loaded
    early       opens the GPU while modules load
    checks      what is computed, with the kernels and with their references      (sampling: against the CPU's sampler;
                delta: recurrent layers; packed: packed weights; fused: kernels that do several things for a few tokens;
                host: tables in host memory)
    compare     how far two results may differ
    machine     driver, GPU, memory, measured rates
    report      the lines, and the texts for each kind of failure
    stopwatch   where the time goes
"""

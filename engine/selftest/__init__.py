"""The kernel self-test: every GPU kernel against its plain reference on this machine's GPU, in seconds.

    python -m engine.selftest [--json]        what `atoll doctor` runs

    __main__    starts the tests in a child process, passes its lines on, and ends it after a time limit, so that a GPU
                that hangs or loses its state is reported, too
    run         the child: facts of the machine, then each check
    jobs        the kernels that will be needed, listed for known GPUs, so that compilers can start at once
    nvml        which GPU is here, asked of the driver before PyTorch is loaded
    early       opens the GPU while modules load
    checks/     what is computed, once with the kernels and once with their references; a subject a file
    compare     how far two results may differ
    machine     driver, GPU, memory, measured rates
    report      the lines, and the texts for each kind of failure
    stopwatch   where the time goes
"""

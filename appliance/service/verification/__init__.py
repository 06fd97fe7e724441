"""Does the service keep its promises? Groups of checks, which test from outside, as a black box, wherever possible.

    run.py         the groups one after another; resumes what a run that was cut off had finished
    subject.py     what is verified: the endpoint of this installation, with a key that lives as long as the run
    health.py, conformance.py, quality.py, performance.py, stability.py, security.py      a group each
    detectors.py   repetition in texts, saturation in probabilities, growth in a series
    report/        Markdown, JSON, HTML
"""

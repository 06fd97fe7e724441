"""Sampling: parameters, penalties, filters, noise, log-probabilities."""

from engine.worker.sample.logprobs import LogprobsTensors, prompt_logprobs
from engine.worker.sample.params import check_token_ids
from engine.worker.sample.sampler import Sampler, SampleResult

__all__ = ["LogprobsTensors", "SampleResult", "Sampler", "check_token_ids", "prompt_logprobs"]

"""The offline API, called as scripts written for vLLM call it, on the real small model."""

import shutil

import pytest
from questions import ANSWER, BEGINNING, QUESTION

from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidRequestError, ModelError, OutOfMemoryPlanError


@pytest.fixture(scope="module")
def llm(smollm2_dir):
    return LLM(model=str(smollm2_dir), dtype="bfloat16", device="cpu", max_model_len=512, gpu_memory_utilization=0.5,
               max_num_seqs=16)


GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_one_string(llm):
    [output] = llm.generate(BEGINNING, GREEDY)
    answer = output.outputs[0]
    assert output.finished
    assert "Paris" in answer.text
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 8
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time < times.first_token_time < times.finished_time


def test_prompt_forms_agree(llm):
    ids = llm.get_tokenizer().encode_trusted("Hello there")
    forms = ["Hello there", {"prompt": "Hello there"}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_params_per_prompt_keep_their_order(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="3 prompts but 2"):
        llm.generate(["a", "b", "c"], params[:2])


def test_chat_ends_at_the_end_token(llm):
    [output] = llm.chat([{"role": "user", "content": QUESTION}],
                        SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.text == ANSWER
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] in llm.get_tokenizer().eos_token_ids


def test_stop_string_ends_text_and_frees_pages(llm):
    params = SamplingParams(temperature=0, max_tokens=60, stop=["Paris"])
    [output] = llm.generate(BEGINNING, params, use_tqdm=False)
    assert "Paris" not in output.outputs[0].text
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "Paris")
    assert llm.engine.kv.pool.num_in_use == 0
    params.include_stop_str_in_output = True
    [output] = llm.generate(BEGINNING, params, use_tqdm=False)
    assert output.outputs[0].text.endswith("Paris")


def test_n_answers_differ_and_share_the_prompt(llm):
    params = SamplingParams(n=4, temperature=1.2, seed=5, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("Once upon a time in the", params, use_tqdm=False)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 4
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]


def test_logprobs_shapes(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    [output] = llm.generate("One two three four", params, use_tqdm=False)
    answer = output.outputs[0]
    assert len(answer.logprobs) == 4
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(position) == 3
        assert position[token].rank == 1
        assert position[token].decoded_token == llm.get_tokenizer().token_text(token)
    assert answer.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(answer.token_ids, answer.logprobs, strict=True)))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_bad_prompts_leave_nothing_behind(llm):
    for bad in (["fine", ""], ["fine", [10**6]], [{"prompt_token_ids": list(range(20, 600))}]):
        with pytest.raises(InvalidRequestError):
            llm.generate(bad, GREEDY, use_tqdm=False)
        assert not llm.engine.has_work()
        llm.engine.check()
    assert llm.generate("still works", GREEDY, use_tqdm=False)[0].finished


def test_dummy_weights_need_only_a_config(smollm2_dir, tmp_path):
    shutil.copy(smollm2_dir / "config.json", tmp_path)
    dummy = LLM(model=tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=128)
    [output] = dummy.generate([{"prompt_token_ids": [5, 6, 7]}],
                              SamplingParams(max_tokens=5, ignore_eos=True, seed=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        dummy.generate("text", use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"quantization": "fp8"}, ConfigError, "--quantization fp8"),
        ({"kv_cache_dtype": "fp8"}, ConfigError, "--kv-cache-dtype fp8"),
        ({"tensor_parallel_size": 2}, ConfigError, "--tensor-parallel-size 2"),
        ({"device": "cuda"}, ConfigError, "--device cuda: no CUDA GPU"),
        ({"trust_remote_code": True}, ConfigError, "never runs code"),
        ({"max_model_len": 10**6}, ConfigError, "8192"),
        ({"max_model_len": 4096, "kv_cache_memory_bytes": 8 << 20}, OutOfMemoryPlanError, "--max-model-len 352"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(smollm2_dir, arguments, error, words):
    with pytest.raises(error, match=words):
        LLM(model=smollm2_dir, **{"device": "cpu", **arguments})


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        LLM(model=tmp_path / "nowhere")

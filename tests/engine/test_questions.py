"""That the questions which other tests ask have one answer: in float32 the best token is far above the second."""

import pytest
from questions import ANSWER, ANSWER_TOKENS, BEGINNING, QUESTION, SURE, margins

from appliance.demo.run import QUESTION as DEMO_QUESTION
from engine.text.tokenizer import TextTokenizer

CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


def ids(tokenizer, messages, **how):
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **how)["input_ids"])


def test_the_answer_is_sure_to_its_end(smollm2_dir, tokenizer):
    tokens, gaps = margins(smollm2_dir, ids(tokenizer, CHAT, add_generation_prompt=True), ANSWER_TOKENS)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == ANSWER
    assert tokens[-1] in TextTokenizer.load(smollm2_dir).eos_token_ids
    assert min(gaps) >= SURE, gaps


def test_how_a_text_goes_on_is_sure(smollm2_dir, tokenizer):
    started = [*CHAT, {"role": "assistant", "content": BEGINNING}]
    for prompt in (tokenizer(BEGINNING)["input_ids"], ids(tokenizer, started, continue_final_message=True)):
        tokens, gaps = margins(smollm2_dir, prompt, 1)
        assert tokenizer.decode(tokens) == " Paris"
        assert gaps[0] >= SURE


def test_the_demonstrations_answer_names_its_city(smollm2_dir, tokenizer):
    prompt = ids(tokenizer, [{"role": "user", "content": DEMO_QUESTION}], add_generation_prompt=True)
    tokens, gaps = margins(smollm2_dir, prompt, 1)
    assert tokenizer.decode(tokens) == "Paris"
    assert gaps[0] >= SURE


def test_a_near_tie_is_seen(smollm2_dir, tokenizer):
    """The measure itself: this question is why the module exists."""
    near = [{"role": "user", "content": "What is the capital of France?"}]
    _, gaps = margins(smollm2_dir, ids(tokenizer, near, add_generation_prompt=True), 1)
    assert gaps[0] < 0.2

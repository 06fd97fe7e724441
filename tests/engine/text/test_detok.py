"""Incremental text: any chunking of the ids gives the text of the whole, and never half a character or stop string."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.core.params import SamplingParams
from engine.text.detok import Detokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import TextTokenizer

SAMPLES = [
    "안녕하세요, 세계!",
    "👩‍👩‍👧‍👦👍🏽🇰🇷",
    "ᄒ\u1161\u11ab jamo",
    "e\u0301",
    "日本語テキスト",
    "plain ascii",
    "\ufffd real",
    "a\x00b",
    "<|im_end|>",
    "mixed 한 👋 <x> \n\n  end ",
]


def byte_fallback_tokenizer(metaspace: bool = False) -> TextTokenizer:
    """As Llama 2 and Gemma have it: '▁' for spaces, <0x00>…<0xFF> for bytes, one leading space stripped."""
    entries = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{b:02X}>" for b in range(256)],
        "▁",
        "a",
        "b",
        "▁a",
        "한",
        "▁▁",
        "국",
        "ab",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={e: i for i, e in enumerate(entries)}, merges=[], byte_fallback=True))
    tokenizer.decoder = (
        decoders.Metaspace()
        if metaspace
        else decoders.Sequence(
            [  # type: ignore[assignment]
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in entries[:3]])
    return TextTokenizer(tokenizer)


FALLBACK, METASPACE = byte_fallback_tokenizer(), byte_fallback_tokenizer(metaspace=True)


def pushed(tokenizer: TextTokenizer, ids: list[int], cuts: list[int], params: SamplingParams) -> list[str]:
    """The deltas of `ids` cut at `cuts`."""
    detokenizer = Detokenizer(tokenizer, params)
    edges = [0, *sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]
    deltas = [detokenizer.push(ids[a:b]).text for a, b in itertools.pairwise(edges)]
    return [*deltas, detokenizer.push([], finished=True).text]


def test_kinds_are_recognised(smol_tokenizer: TextTokenizer) -> None:
    assert smol_tokenizer.pieces.kind == "byte level"
    assert FALLBACK.pieces.kind == "byte fallback"
    assert METASPACE.pieces.kind == "other"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_in_random_chunks_equal_decode(
    smol_tokenizer: TextTokenizer, data: st.DataObject, skip: bool
) -> None:
    tokenizer = data.draw(st.sampled_from([smol_tokenizer, FALLBACK, METASPACE]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    params = SamplingParams(skip_special_tokens=skip)
    assert "".join(pushed(tokenizer, ids, cuts, params)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(SAMPLES)).map("".join)),
    cuts=st.lists(st.integers(0, 200), max_size=10),
)
def test_text_survives_the_round_trip(smol_tokenizer: TextTokenizer, text: str, cuts: list[int]) -> None:
    ids = smol_tokenizer.encode_text(text)
    shown = "".join(pushed(smol_tokenizer, ids, cuts, SamplingParams()))
    assert shown == smol_tokenizer.decode(ids)
    if all(" " <= c <= "~" or "가" <= c <= "힣" for c in text):  # rarer bytes are missing from this vocabulary
        assert shown == text


@pytest.mark.parametrize("text", SAMPLES)
def test_no_delta_ends_inside_a_character(smol_tokenizer: TextTokenizer, text: str) -> None:
    detokenizer = Detokenizer(smol_tokenizer, SamplingParams())
    deltas = [detokenizer.push([i]).text for i in smol_tokenizer.encode_text(text)]
    assert "".join(deltas) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


def test_a_broken_character_at_the_end_is_shown_when_the_text_is_over(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode_text("가")[:2]
    detokenizer = Detokenizer(smol_tokenizer, SamplingParams())
    assert detokenizer.push(ids).text == ""
    assert detokenizer.push([], finished=True).text == smol_tokenizer.decode(ids) == "\ufffd"


def test_long_broken_output_costs_linear_time(smol_tokenizer: TextTokenizer) -> None:
    """A library stream holds back for ever while the text ends in U+FFFD, and decodes all of it again each time."""
    lead = smol_tokenizer.encode_text("가")[0]
    detokenizer = Detokenizer(smol_tokenizer, SamplingParams())
    assert "".join(detokenizer.push([lead]).text for _ in range(20_000)).count("\ufffd") >= 19_999


def test_the_stop_token_itself_is_not_shown(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode_text("one two")
    shown = Detokenizer(smol_tokenizer, SamplingParams()).push(ids, finished=True, stop_token=True)
    assert shown.text == smol_tokenizer.decode(ids[:-1])
    assert shown.num_tokens == len(ids)
    included = SamplingParams(include_stop_str_in_output=True)
    assert Detokenizer(smol_tokenizer, included).push(ids, finished=True, stop_token=True).text == "one two"


def test_offsets_count_the_characters_before_each_token(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode_text("Hello 가 world")
    delta = Detokenizer(smol_tokenizer, SamplingParams()).push(ids, finished=True)
    for i, offset in enumerate(delta.offsets):
        complete = smol_tokenizer.decode(ids[:i]).rstrip("\ufffd")
        assert offset == len(complete)


def test_without_detokenize_there_is_no_text(smol_tokenizer: TextTokenizer) -> None:
    delta = Detokenizer(smol_tokenizer, SamplingParams(detokenize=False)).push([1, 81], finished=True)
    assert (delta.text, delta.num_tokens) == ("", 2)


# -- stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the match that ends first, of several the longest; (where it ends, which)."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            return end, max(matches, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(
    chunks=st.lists(st.text("ab한", max_size=4), max_size=12),
    include=st.booleans(),
    stops=st.lists(st.text("ab한", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_by_definition(chunks: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, text = "", "".join(chunks)
    for chunk in chunks:
        shown += matcher.push(chunk)
        if matcher.found is not None:
            break
        # nothing that may still turn out to be a stop string has been shown, and no more than that is held back
        so_far = text[: sum(map(len, chunks[: chunks.index(chunk) + 1]))] if chunks.count(chunk) == 1 else None
        if so_far is not None and not include:
            held = max((n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
            assert shown == so_far[: len(so_far) - held]
    shown += matcher.flush()
    match = first_stop(text, stops)
    if match is None:
        assert shown == text
        assert matcher.found is None
    else:
        end, stop = match
        assert matcher.found == stop
        assert shown == text[: end if include else end - len(stop)]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 6))
def test_stopping_does_not_depend_on_chunks(
    smol_tokenizer: TextTokenizer, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    ids = smol_tokenizer.encode_text(
        data.draw(st.lists(st.sampled_from(["the ", "cat", "한국", " sat", "\n"])).map("".join))
    )
    stops = data.draw(st.lists(st.sampled_from(["cat", "at s", "한", "\n\n", "the the"]), max_size=3))
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100)

    def run(chunks: list[list[int]]) -> tuple[str, int, str | None]:
        detokenizer, text, count, found = Detokenizer(smol_tokenizer, params), "", 0, None
        for i, chunk in enumerate(chunks):
            delta = detokenizer.push(chunk, finished=i == len(chunks) - 1)
            text, count, found = text + delta.text, count + delta.num_tokens, delta.stop_string
            if delta.stopped:
                break
        return text, count, found

    chunks, rest = [], list(ids)
    while rest:
        size = data.draw(st.integers(1, 5))
        chunks.append(rest[:size])
        rest = rest[size:]
    assert run([ids]) == run(chunks) == run([[i] for i in ids] or [[]])


def test_min_tokens_come_before_any_stop(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode_text("x x x x x x")
    delta = Detokenizer(smol_tokenizer, SamplingParams(stop=["x"], min_tokens=3)).push(ids, finished=True)
    assert (delta.text, delta.num_tokens, delta.stop_string) == ("x x x ", 4, "x")


def test_many_long_stop_strings_are_cheap(smol_tokenizer: TextTokenizer) -> None:
    params = SamplingParams(stop=["a" * n + "b" for n in range(900, 964)])
    text = "a" * 4000
    detokenizer = Detokenizer(smol_tokenizer, params)
    shown = "".join(detokenizer.push([i]).text for i in smol_tokenizer.encode_text(text))
    assert len(shown) == 4000 - 963


def test_token_bytes_add_up_to_the_text(smol_tokenizer: TextTokenizer) -> None:
    for text in SAMPLES:
        ids = smol_tokenizer.encode_text(text)
        assert b"".join(map(smol_tokenizer.token_bytes, ids)).decode() == text
    assert smol_tokenizer.token_bytes(10**9) == b""
    assert smol_tokenizer.token_text(smol_tokenizer.encode_text("가")[0]) == "\ufffd"


def test_fallback_runs_are_decided_as_a_whole() -> None:
    rng = random.Random(0)
    good = [FALLBACK.token_id(f"<0x{b:02X}>") for b in "한👋".encode()]
    for _ in range(50):
        ids = [i for i in good if rng.random() < 0.8] + [FALLBACK.token_id("a")]
        assert "".join(pushed(FALLBACK, ids, [1, 2, 3], SamplingParams())) == FALLBACK.decode(ids)  # type: ignore[arg-type]

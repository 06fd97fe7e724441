"""The texts by which a quantisation is judged, the scores of them, and their files."""

import json
import math

import pytest

from engine.errors import ConfigError
from engine.quality import LANGUAGES, Score, pieces, read_reference, text, write_reference


def score(*tokens: int, logprob: float = -1.0) -> Score:
    found = Score()
    for token in tokens:
        found.add(token, logprob, token)
    return found


def test_texts_come_with_the_package_in_both_languages():
    english, korean = map(text, LANGUAGES)
    assert min(len(english.encode()), len(korean.encode())) > 20_000
    assert sum("가" <= letter <= "힣" for letter in korean) > len(korean) / 3
    assert not any("가" <= letter <= "힣" for letter in english)


@pytest.mark.parametrize("language", LANGUAGES)
def test_pieces_are_the_whole_text_in_paragraphs_that_any_service_has_room_for(language):
    found = pieces(language)
    assert "\n\n".join(found) == text(language)
    assert max(len(piece.encode()) for piece in found) <= 1500
    assert len(found) <= 20


def test_perplexity_and_agreement_are_those_of_the_definition():
    a, b = score(1, 2, 3, 4, logprob=math.log(0.25)), score(1, 2, 3, 4)
    b.likeliest = [1, 2, 9, 4]
    assert a.perplexity == pytest.approx(4)
    assert a.frequency_perplexity == pytest.approx(4)  # four tokens, equally frequent
    assert score(7, 7, 7, 7).frequency_perplexity == pytest.approx(1)
    assert a.agreement(b) == 0.75


def test_scores_are_compared_over_the_tokens_that_both_have_read():
    longer, shorter = score(1, 2, 3, 4), score(1, 2, 3)
    both = longer.alike(shorter)
    assert both is not None
    assert [len(each.tokens) for each in both] == [3, 3]
    assert longer.alike(score(1, 5, 3)) is None
    assert longer.alike(Score()) is None


def test_a_reference_file_is_read_back(tmp_path):
    path = tmp_path / "reference.json"
    write_reference(path, "tiny", {"en": score(1, 2), "ko": score(3, 4, logprob=-2.0)})
    found = read_reference(path)
    assert found["en"].tokens == [1, 2]
    assert found["ko"].losses == [2.0, 2.0]


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda stored: stored.update(schema_version=2), "schema_version 2"),
        (lambda stored: stored.pop("texts"), "KeyError"),
        (lambda stored: stored["texts"]["en"].update(text_sha256="0"), "other texts"),
        (lambda stored: stored["texts"]["en"]["tokens"].pop(), "do not fit together"),
        (lambda stored: stored["texts"]["en"].update(losses=[1.0, float("nan")]), "do not fit together"),
        (lambda stored: stored["texts"]["en"].update(losses=["1", "2"]), "do not fit together"),
        (lambda stored: stored["texts"]["en"].update(likeliest=[True, 1]), "do not fit together"),
        (lambda stored: stored["texts"].update(en=[]), "TypeError"),
    ],
)  # fmt: skip
def test_a_damaged_reference_is_refused(change, match, tmp_path):
    path = tmp_path / "reference.json"
    write_reference(path, "tiny", {"en": score(1, 2)})
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=match):
        read_reference(path)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "x").write_text("not json")
    with pytest.raises(ConfigError, match="no quality reference"):
        read_reference(tmp_path / "x")

"""The tokenizer gives back any text as it was, and keeps control tokens whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.demo import MODEL_DIR

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
SETTINGS = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
CONTROL = [
    *SETTINGS["extra_special_tokens"].values(),
    *(SETTINGS[f"{name}_token"] for name in ("pad", "eos", "bos", "unk", "mask")),
]


def holds_control(text: str) -> bool:
    return any(token in text for token in CONTROL)


@given(
    st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: not holds_control(text))
)
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("token", CONTROL)
def test_a_control_token_is_one_token_anywhere(token: str) -> None:
    wanted = TOKENIZER.token_to_id(token)
    assert wanted is not None
    assert TOKENIZER.encode(f"a{token}b", add_special_tokens=False).ids.count(wanted) == 1


def test_digits_stand_alone() -> None:
    assert TOKENIZER.encode("12345", add_special_tokens=False).tokens == list("12345")

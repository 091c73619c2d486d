"""The tokenizer of a Hugging Face folder, read with the ``tokenizers`` library: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tokenizers

from tba_megatron.errors import ModelError
from tba_megatron.types import TokenIds


class HfTokenizer:
    """Implements ``types.Tokenizer``: text to ids as it stands, ids to text without special tokens.

    ``eos_ids`` are those of generation_config.json (of config.json where that names none), and then the
    ``eos_token`` of tokenizer_config.json: what Hugging Face's ``generate`` and vLLM stop at. The first one
    ends demonstrations. ModelError when a file is missing or unreadable, when no EOS is named, or when one is
    outside the vocabulary.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        # Either may be stored in tokenizer.json and would cut or lengthen prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._eos_ids = self._read_eos_ids(folder)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    def encode(self, text: str) -> TokenIds:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: TokenIds) -> str:
        ids = [int(i) for i in token_ids if int(i) not in self._eos_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _read_eos_ids(self, folder: Path) -> tuple[int, ...]:
        ids: list[object] = []
        for name in ("generation_config.json", "config.json"):
            named = _read_json(folder / name).get("eos_token_id")
            ids += named if isinstance(named, list) else [] if named is None else [named]
            if ids:
                break
        token = _read_json(folder / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            ids.append(self._tokenizer.token_to_id(text))
        eos_ids = tuple(i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < self._vocab_size)
        if len(eos_ids) != len(set(ids)):
            raise ModelError(f"{folder}: end-of-sequence ids {ids} are not all in the vocabulary of {self._vocab_size}")
        if not eos_ids:
            raise ModelError(f"{folder}: no end-of-sequence token; name one as eos_token_id in generation_config.json")
        return eos_ids


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise ModelError(f"{path}: no such file; a model needs a Hugging Face folder with a tokenizer.json")
    if not isinstance(_read_json(path).get("model"), dict):
        raise ModelError(f"{path}: not a tokenizer, because it has no model")
    return tokenizers.Tokenizer.from_file(str(path))


def _read_json(path: Path) -> Mapping[str, object]:
    """The object in a file; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value

"""The tokenizer of a Hugging Face folder, without torch and transformers: tokenizer.json, or a bare tokenizer.model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Protocol

import numpy as np
import tokenizers

from tba_megatron.errors import ModelError, shown
from tba_megatron.models.tokenizer_files import TokenizerFiles, read_json, read_tokenizer_files
from tba_megatron.types import TokenIds

_MAX_NAMED = 3


class _Backend(Protocol):
    @property
    def ids(self) -> Mapping[str, int]: ...

    @property
    def added_ids(self) -> frozenset[int]: ...

    @property
    def default_eos_token(self) -> str | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class HfTokenizer:
    """Implements ``types.Tokenizer``: text to ids as it stands, ids to text without special tokens.

    A tokenizer.json is read with the ``tokenizers`` library; a folder with a tokenizer.model alone with
    ``sentencepiece``. ``eos_ids`` are those of generation_config.json (of config.json where that names none), and then
    the ``eos_token`` of tokenizer_config.json: what Hugging Face's ``generate`` and vLLM stop at. The first one ends
    demonstrations. ModelError when a file is missing or unreadable, when no EOS is named, when one is outside the
    vocabulary, or when the tokenizer has more ids than config.json's ``vocab_size``.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        files = read_tokenizer_files(folder)
        path, self._backend = _read_backend(folder, files)
        if not self._backend.ids:
            raise ModelError(f"{path}: not a tokenizer, because its vocabulary is empty; download it again")
        self._vocab_size = max(self._backend.ids.values()) + 1
        _check_vocabulary(path, self._backend.ids)
        self._eos_ids = self._read_eos_ids(folder, files)
        # A padding token is known by its name only where it is an added token: some models pad with plain text.
        padding = self._backend.ids.get(files.token("pad_token") or "")
        self._dropped_ids = frozenset({*self._eos_ids, *({padding} & self._backend.added_ids)})

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return self._vocab_size

    @property
    def ids(self) -> Mapping[str, int]:
        """The id of every token by its text, as the file has it."""
        return self._backend.ids

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    def encode(self, text: str) -> TokenIds:
        return np.array(self._backend.encode(text), dtype=np.int32)

    def decode(self, token_ids: TokenIds) -> str:
        ids = np.asarray(token_ids).tolist()  # plain numbers: a numpy scalar each would cost more than the decoding
        return self._backend.decode([i for i in ids if i not in self._dropped_ids])

    def _read_eos_ids(self, folder: Path, files: TokenizerFiles) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids += _named_ids(folder / name)
            if ids:
                break
        text = files.token("eos_token") or (None if ids else self._backend.default_eos_token)
        if text is not None:
            if text not in self._backend.ids:
                raise ModelError(f"{folder}: the eos_token {shown(text)} is not in the vocabulary; name one that is")
            ids.append(self._backend.ids[text])
        eos_ids = tuple(dict.fromkeys(ids))
        if not all(0 <= i < self._vocab_size for i in eos_ids):
            raise ModelError(
                f"{folder}: end-of-sequence ids {short(ids)} are not all in the vocabulary of {self._vocab_size}; "
                "mend eos_token_id in generation_config.json or config.json"
            )
        if not eos_ids:
            raise ModelError(f"{folder}: no end-of-sequence token; name one as eos_token_id in generation_config.json")
        return eos_ids


def _named_ids(path: Path) -> list[int]:
    """The ``eos_token_id`` of a file, which may be one, a list of them or absent."""
    value = read_json(path).get("eos_token_id")
    named: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in named if isinstance(i, int) and not isinstance(i, bool)]
    if len(ids) != len(named):
        raise ModelError(f"{path}: eos_token_id {short(value)} is neither a token id nor a list of them; mend it")
    return ids


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library's errors have no type of their own
        reason = shown(" ".join(str(error).split()), 200)
        raise ModelError(f"{path}: not a tokenizer ({reason}); download it again") from None


class _TokenizersBackend:
    """A tokenizer.json."""

    default_eos_token = None

    def __init__(self, path: Path) -> None:
        if not isinstance(read_json(path).get("model"), dict):
            raise ModelError(f"{path}: not a tokenizer, because it has no model; download it again")
        self._tokenizer = _from_file(path)
        # Either may be stored in tokenizer.json and would cut or lengthen prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.ids: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.added_ids = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _read_backend(folder: Path, files: TokenizerFiles) -> tuple[Path, _Backend]:
    path = folder / "tokenizer.json"
    if path.exists():
        return path, _TokenizersBackend(path)
    path = folder / "tokenizer.model"
    if path.exists():
        # Only such folders pay for the import of sentencepiece.
        from tba_megatron.models.sentencepiece_tokenizer import SentencePieceTokenizer

        return path, SentencePieceTokenizer(path, files)
    raise ModelError(
        f"{folder}: no tokenizer.json and no tokenizer.model; copy one there, or write it with transformers'"
        " AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _check_vocabulary(path: Path, ids: Mapping[str, int]) -> None:
    """The model must have a row for every id of the tokenizer; more rows than ids are padding and do no harm."""
    config = path.with_name("config.json")
    rows = read_json(config).get("vocab_size")
    size = max(ids.values()) + 1
    if not isinstance(rows, int) or size <= rows:
        return
    over = sorted((i, token) for token, i in ids.items() if i >= rows)
    names = ", ".join(f"{i} {short(token)}" for i, token in over[:_MAX_NAMED])
    more = f" and {len(over) - _MAX_NAMED} more" if len(over) > _MAX_NAMED else ""
    raise ModelError(
        f"{path}: the tokenizer needs {size} ids, but {config} has vocab_size {rows}; remove the tokens without a row"
        f" ({names}{more}) from the tokenizer, or give the model rows with transformers' resize_token_embeddings"
    )

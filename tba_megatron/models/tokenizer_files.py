"""What the JSON files beside a tokenizer say about it: its special and added tokens, its flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

from tokenizers import AddedToken

from tba_megatron.errors import ModelError
from tba_megatron.models.settings import LARGEST_SIZE, read_object

# In the order in which Hugging Face gives new ids to those that the vocabulary lacks.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json of a folder, read as transformers does.

    ``declared`` are the added tokens whose ids the file ``declared_in`` gives, ``named`` the special tokens in the
    order in which they get ids where the vocabulary lacks them. ``added_tokens_decoder`` in tokenizer_config.json
    replaces the two other files; without it special_tokens_map.json goes before tokenizer_config.json. Source:
    transformers ``PreTrainedTokenizerBase._from_pretrained`` (5.19).
    """

    settings: Mapping[str, object]
    declared: Mapping[int, AddedToken]
    declared_in: Path
    named: tuple[AddedToken, ...]

    def token(self, name: str) -> str | None:
        """The text of a special token by its name, such as eos_token."""
        value = self.settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        return text if isinstance(text, str) else None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Every one of the files may be missing. ModelError when one is not what transformers writes."""
    try:
        return _read(folder)
    except UnicodeEncodeError as error:  # of AddedToken; JSON can write half of a surrogate pair
        raise ModelError(
            f"{folder}: the token {short(error.object)} of tokenizer_config.json, special_tokens_map.json or "
            "added_tokens.json is not Unicode text; download these files again"
        ) from None


def _read(folder: Path) -> TokenizerFiles:
    path = folder / "tokenizer_config.json"
    settings = dict(read_json(path))
    decoder = settings.get("added_tokens_decoder")
    if decoder is None:
        settings |= read_json(folder / "special_tokens_map.json")
    named = tuple({token.content: token for token in _named(settings)}.values())
    if decoder is not None:
        if not isinstance(decoder, Mapping) or not all(isinstance(value, Mapping) for value in decoder.values()):
            raise ModelError(f"{path}: added_tokens_decoder is not an object of added tokens by id")
        declared = [(_id(index, path), _token(value, special=False)) for index, value in decoder.items()]
    else:
        path = folder / "added_tokens.json"
        special = {token.content for token in named}
        added = read_json(path).items()
        declared = [(_id(index, path), _token(text, special=text in special)) for text, index in added]
    if len(dict(declared)) != len(declared):
        raise ModelError(f"{path}: two added tokens have the same id; give each its own")
    # The named form of a token is that of its declaration, flags included.
    by_text = {token.content: token for _, token in declared}
    named = tuple(_as_special(by_text.get(token.content, token)) for token in named)
    return TokenizerFiles(settings=settings, declared=dict(declared), declared_in=path, named=named)


def read_json(path: Path) -> Mapping[str, object]:
    """The object in a file; empty where there is no such file. ModelError when it cannot be read."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def _named(settings: Mapping[str, object]) -> Iterator[AddedToken]:
    own = [name for name in settings if name.endswith("_token") and name not in _NAMES]
    values = [settings.get(name) for name in (*_NAMES, *own)]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if isinstance(extra, Mapping):
        values += extra.values()
    elif isinstance(extra, list):
        values += extra
    # Other keys that end so, such as add_bos_token, hold neither a text nor an object.
    yield from (_token(value, special=True) for value in values if isinstance(value, str | Mapping) and value)


def _token(value: object, *, special: bool) -> AddedToken:
    if not isinstance(value, Mapping):
        return AddedToken(str(value), special=special, normalized=not special)
    special = bool(value.get("special", special))
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(str(value.get("content", "")), special=special, **flags)


def _as_special(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, special=True, **flags)


def _id(value: object, path: Path) -> int:
    text = str(value) if isinstance(value, str | int) else ""
    if not text.isdecimal() or len(text) > len(str(LARGEST_SIZE)) or int(text) > LARGEST_SIZE:
        raise ModelError(f"{path}: {short(value)} is not the id of an added token; ids are whole numbers from 0")
    return int(text)

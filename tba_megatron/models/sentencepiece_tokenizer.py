"""A bare ``tokenizer.model`` read as Hugging Face's Llama tokenizer reads it: added tokens first, then sentencepiece.

Imported only for folders that have no tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models

from tba_megatron.errors import ModelError
from tba_megatron.models.settings import read_file
from tba_megatron.models.tokenizer_files import TokenizerFiles

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # What sentencepiece writes for a space.
_PROTO: Any = sentencepiece_model_pb2  # Makes its classes at run time, where a type checker does not see them.
_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


class SentencePieceTokenizer:
    """Text to ids and back with the BPE model of a ``tokenizer.model``.

    The ids are those of the tokenizer.json that Hugging Face publishes for such a model (transformers
    ``LlamaConverter``, 5.19). Pieces merge by their scores. A text starts with a dummy space; with ``legacy`` so does
    every stretch of text after an added token. transformers' ``LlamaTokenizer`` ignores the normalizer of the model,
    such as the removal of repeated spaces, and so does this class; but where ``add_prefix_space`` is not set, the
    model says whether there is a dummy space. A flag ``legacy`` that is missing counts as false.

    ModelError when the file is not a sentencepiece BPE model, when ``tokenizer_class`` is not Llama's, or when an added
    token contradicts the model.
    """

    def __init__(self, path: Path, files: TokenizerFiles) -> None:
        model = _read_model(path)
        _check_class(path, files)
        eos = model.trainer_spec.eos_id
        self.default_eos_token: str | None = model.pieces[eos].piece if 0 <= eos < len(model.pieces) else None
        prefix = files.settings.get("add_prefix_space")
        self._prefix = bool(model.normalizer_spec.add_dummy_prefix if prefix is None else prefix)
        self._legacy = bool(files.settings.get("legacy", False))
        added = _added_tokens(model, files)
        self._ids = _all_ids(model, files, added)
        self._pieces = _plain_processor(model, self._ids)
        self._texts = {i: text for text, i in self._ids.items()}
        self._special_ids = frozenset(self._ids[text] for text, token in added.items() if token.special)
        # A tokenizer with no model finds the added tokens, and nothing else, exactly as Hugging Face's does.
        self._splitter = tokenizers.Tokenizer(models.BPE())
        self._splitter.add_tokens(list(added.values()))
        self._added_ids = {self._splitter.token_to_id(text): self._ids[text] for text in added}
        strip = [decoders.Strip(content=" ", left=1)] if self._prefix else []
        self._decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    @property
    def ids(self) -> Mapping[str, int]:
        """The id of every piece and added token."""
        return self._ids

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of the added tokens, special or not."""
        return frozenset(self._added_ids.values())

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens; ids that no token has are left out, as Hugging Face does."""
        return self._decoder.decode([self._texts[i] for i in ids if i in self._texts and i not in self._special_ids])

    def _encoded(self, text: str) -> Iterator[int]:
        found = self._splitter.encode(text, add_special_tokens=False)
        end = 0
        for key, (start, stop) in zip(found.ids, found.offsets, strict=True):
            yield from self._encoded_stretch(text[end:start], first=end == 0)
            yield self._added_ids[key]
            end = stop
        yield from self._encoded_stretch(text[end:], first=end == 0)

    def _encoded_stretch(self, text: str, *, first: bool) -> list[int]:
        if text and self._prefix and (first or self._legacy):
            text = _SPACE + text
        return self._pieces.encode(text, out_type=int)


def _read_model(path: Path) -> Any:
    """The ModelProto of a BPE model."""
    data = read_file(path)
    try:
        sentencepiece.SentencePieceProcessor().load_from_serialized_proto(data)
    except RuntimeError:
        raise ModelError(
            f"{path}: not a sentencepiece model; copy it again, or save the model's tokenizer as tokenizer.json"
        ) from None
    model = _PROTO.ModelProto.FromString(data)
    if model.trainer_spec.model_type != _PROTO.TrainerSpec.BPE:
        kind = _PROTO.TrainerSpec.ModelType.Name(model.trainer_spec.model_type)
        raise ModelError(
            f"{path}: a {kind} model, but Hugging Face's Llama tokenizer reads only BPE;"
            " save the model's tokenizer as tokenizer.json"
        )
    return model


def _check_class(path: Path, files: TokenizerFiles) -> None:
    name = files.settings.get("tokenizer_class")
    if name is not None and name not in _CLASSES:
        raise ModelError(
            f"{path.with_name('tokenizer_config.json')}: tokenizer_class {short(name)} with a bare {path.name}, which"
            " is read for LlamaTokenizer alone; save the model's tokenizer as tokenizer.json"
        )


def _added_tokens(model: Any, files: TokenizerFiles) -> dict[str, AddedToken]:
    """Every token that is cut out of a text before sentencepiece sees it, by its text."""
    kinds = _PROTO.ModelProto.SentencePiece
    # The unknown token is special in Hugging Face too: written out in a text it is itself.
    special = {kinds.UNKNOWN: True, kinds.CONTROL: True, kinds.USER_DEFINED: False}
    own = [
        AddedToken(piece.piece, special=special[piece.type], normalized=False)
        for i, piece in enumerate(model.pieces)
        if piece.type in special and i not in files.declared
    ]
    declared = [files.declared[i] for i in sorted(files.declared)]
    return {token.content: token for token in (*own, *declared, *files.named) if token.content}


def _all_ids(model: Any, files: TokenizerFiles, added: Iterable[str]) -> dict[str, int]:
    """The ids of the pieces, then those that the files declare, then the next free ones."""
    ids: dict[str, int] = {piece.piece: i for i, piece in enumerate(model.pieces)}
    for i, token in files.declared.items():
        if ids.get(token.content, i) != i:
            raise ModelError(
                f"{files.declared_in}: the added token {short(token.content)} has the id {i}, but tokenizer.model gives"
                f" it {ids[token.content]}; take both files from the same model"
            )
        if i < len(model.pieces):  # A place kept free in the model, under another name.
            ids.pop(model.pieces[i].piece, None)
        ids[token.content] = i
    for text in added:
        ids.setdefault(text, max(ids.values()) + 1)
    return ids


def _plain_processor(model: Any, ids: Mapping[str, int]) -> sentencepiece.SentencePieceProcessor:
    """Splits a text as it stands, without a normalizer, into pieces that keep their names."""
    plain = _PROTO.ModelProto.FromString(model.SerializeToString())
    plain.normalizer_spec.precompiled_charsmap = b""
    plain.normalizer_spec.add_dummy_prefix = False
    plain.normalizer_spec.remove_extra_whitespaces = False
    for piece in plain.pieces:
        if piece.piece not in ids and piece.type not in (piece.UNKNOWN, piece.BYTE):
            piece.type = piece.UNUSED
    return sentencepiece.SentencePieceProcessor(model_proto=plain.SerializeToString())

"""A bare tokenizer.model against what transformers makes of the same model and of the same JSON files."""

import functools
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from tba_megatron.errors import ModelError
from tba_megatron.models.tokenizer import HfTokenizer

ROOT = Path(__file__).parents[2]
SENTENCES = [
    "the quick brown fox   jumps over the lazy dog 12345",
    "let x = 12 + 30 ; so the answer is 42 .",
    "日本語 の テキスト",
    "    indented line, then the answer",
    "\tdef f(x): return x * x",
]
SPECIAL = ("<unk>", "<s>", "</s>")
NASTY = [
    *("", " ", "  ", "   ", "         ", "x", " x", "  x", "x ", "x  ", "the  answer", "the   answer"),
    *("▁", "▁x", " ▁x", "a▁b", "\n", "\nx", "x\n", "\n\n  x\n", "\r\n", "\t", "\tx", "x\t \n"),
    *("\x00", "\x00\x01\x7f", "a\u200bb", "\u00a0x", "\u3000x", "\ufeffx", "\U0010ffff", "<0x0A>", "<0x00>"),
    *("12345", " 1 2", "3.14", "½", "ﬁ", "é", "e\u0301", "日本語", "한국어", "שלום", "👋🏽", "👨\u200d👩\u200d👧"),
    *("</s>", " </s>", "</s> ", "</s>x", "</s> x", "x</s>", "x </s> y", "</s></s>", "</s>\n</s>", "</s", "<s"),
    *("<s>x</s>", "<unk>", "a<unk>b", "<s> the answer</s> the", "<|im_start|>user\nthe answer<|im_end|>\n"),
]  # fmt: skip
FRAGMENTS = [*NASTY, "answer", "the", " the", "<|im_end|>", "<tool>", "[PAD]"]
TEXTS = st.text(max_size=12) | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6).map("".join)
repeatable = settings(derandomize=True, max_examples=200)


def train(**options) -> bytes:
    """A small model with the settings of Llama's."""
    options = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        **options,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20), model_writer=model, minloglevel=2, num_threads=1, **options
    )
    return model.getvalue()


@functools.cache
def small_model() -> bytes:
    return train()


@functools.cache
def real_model() -> bytes:
    """32000 pieces; runs of spaces have the lowest scores but low ids."""
    if importlib.util.find_spec("mistral_common") is None:
        pytest.skip("mistral_common, whose tokenizer.model is read here, is not installed")
    return (resources.files("mistral_common") / "data" / "tokenizer.model.v1").read_bytes()


MODELS = pytest.mark.parametrize("model", [small_model, real_model], ids=["small", "real"])
LEGACY = pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "not-legacy"])


def write_folder(folder, model, tokenizer_config=None, **files) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    if tokenizer_config is not None:
        tokenizer_config = {"tokenizer_class": "LlamaTokenizer", **tokenizer_config}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@functools.cache
def vocabulary_and_merges(model: bytes):
    """What a published tokenizer.json holds: the merges in the order of the scores."""
    from transformers.convert_slow_tokenizer import generate_merges

    protos: Any = sentencepiece_model_pb2
    pieces = protos.ModelProto.FromString(model).pieces
    vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
    return vocabulary, generate_merges(vocabulary, {piece.piece: piece.score for piece in pieces})


@functools.cache
def published(model: bytes):
    """The tokenizer.json of Llama: transformers' converter, with a prefix in its normalizer."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from transformers.convert_slow_tokenizer import LlamaConverter

    vocabulary, merges = vocabulary_and_merges(model)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    converter: Any = SimpleNamespace(original_tokenizer=SimpleNamespace(legacy=True, add_prefix_space=True))
    tokenizer.normalizer = LlamaConverter.normalizer(converter, None)
    tokenizer.decoder = LlamaConverter.decoder(converter, "▁", True)
    return tokenizer


@functools.cache
def llama_tokenizer(model: bytes, legacy: bool):
    from transformers import LlamaTokenizer

    vocabulary, merges = vocabulary_and_merges(model)
    return LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=legacy)


def transformers_ids(folder, text):
    """What transformers makes of a folder. Its conversion of a bare model orders the merges by id and joins a leading
    space with the prefix, so the texts that it is asked about have neither runs of spaces nor one in front."""
    return transformers_tokenizer(folder)(text, add_special_tokens=False).input_ids


@functools.cache
def transformers_tokenizer(folder):
    from transformers import LlamaTokenizer

    return LlamaTokenizer.from_pretrained(folder)


@functools.cache
def ours(model: bytes, legacy: bool) -> HfTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return HfTokenizer(write_folder(Path(folder), model, {"legacy": legacy}))


def agree_with_the_published_tokenizer(model, text):
    assert ours(model, True).encode(text).tolist() == published(model).encode(text, add_special_tokens=False).ids


def agree_with_the_llama_tokenizer(model, text):
    # It drops its prefix before a leading space, which the published files keep: so it is given the prefix.
    prefixed = text if not text or text.startswith(SPECIAL) else "▁" + text
    theirs = llama_tokenizer(model, False)(prefixed, add_special_tokens=False).input_ids
    assert ours(model, False).encode(text).tolist() == theirs


@MODELS
def test_nasty_texts_have_the_published_ids(model):
    for text in NASTY:
        agree_with_the_published_tokenizer(model(), text)
        agree_with_the_llama_tokenizer(model(), text)


@MODELS
@repeatable
@given(text=TEXTS)
def test_any_text_has_the_ids_of_the_published_tokenizer(model, text):
    agree_with_the_published_tokenizer(model(), text)


@MODELS
@repeatable
@given(text=TEXTS)
def test_without_legacy_any_text_has_the_ids_of_the_llama_tokenizer(model, text):
    agree_with_the_llama_tokenizer(model(), text)


@MODELS
@LEGACY
@repeatable
@given(data=st.data())
def test_any_ids_decode_as_in_transformers(model, legacy, data):
    mine, theirs = ours(model(), legacy), llama_tokenizer(model(), legacy)
    ids = st.integers(0, mine.vocab_size + 3) | st.integers(3, 258)  # The second kind are bytes.
    drawn = data.draw(st.lists(ids, max_size=8))
    assert mine.decode(np.array(drawn)) == theirs.decode(drawn, skip_special_tokens=True)


@MODELS
@LEGACY
@repeatable
@given(text=TEXTS)
def test_text_without_special_tokens_comes_back(model, legacy, text):
    tokenizer = ours(model(), legacy)
    for written in ("▁", *SPECIAL):
        text = text.replace(written, "")
    if not any(special in text for special in SPECIAL):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_json_of_the_same_model_goes_first_and_has_the_same_ids(tmp_path):
    folder = write_folder(tmp_path, b"not read", {"eos_token": "</s>"})
    published(real_model()).save(str(folder / "tokenizer.json"))
    tokenizer = HfTokenizer(folder)
    for text in NASTY:
        ids = tokenizer.encode(text)
        assert ids.tolist() == ours(real_model(), True).encode(text).tolist()
        assert tokenizer.decode(ids) == ours(real_model(), True).decode(ids)


@LEGACY
def test_transformers_reads_a_bare_folder_the_same_way(tmp_path, legacy):
    from transformers import AutoTokenizer

    config = {"model_type": "llama", "vocab_size": 32000}
    folder = write_folder(tmp_path, real_model(), {"legacy": legacy, "add_bos_token": True}, config=config)
    mine, theirs = HfTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (mine.vocab_size, mine.eos_ids) == (len(theirs), (theirs.eos_token_id,)) == (32000, (2,))
    for text in NASTY:
        stretches = functools.reduce(lambda rest, special: rest.replace(special, "\0"), SPECIAL, text).split("\0")
        if not any(stretch.startswith((" ", "▁")) or "  " in stretch for stretch in stretches):
            assert mine.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids, text


# Texts with no stretch that begins with a space, and no run of spaces.
ADDED_TEXTS = ["<|im_end|>", "the<|im_end|>x", "the <|im_end|>the", "the<tool>x", "the <tool>\tx", "<tool>x</s>",
               "zqx\tzqxd\tzqx", "zqx", "x zqx", "[PAD]the", "<s>the<|im_end|></s>", "the<0x0A><tool>",
               "the<|end|>\nx", "zqx<|im_end|>", "x<|im_end|>"]  # fmt: skip
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
DECLARED = {
    **{str(i): {**FLAGS, "content": text} for i, text in enumerate(SPECIAL)},
    "32000": {**FLAGS, "content": "<|im_end|>"},
    "32001": {**FLAGS, "content": "<tool>", "lstrip": True, "rstrip": True, "special": False},
    "32003": {**FLAGS, "content": "<|end|>", "rstrip": True},
    "32002": {**FLAGS, "content": "zqx", "single_word": True, "special": False, "normalized": True},
}


@LEGACY
def test_declared_tokens_are_cut_out_as_in_transformers(tmp_path, legacy):
    config = {"legacy": legacy, "added_tokens_decoder": DECLARED, "eos_token": "<|end|>", "pad_token": "[PAD]"}
    folder = write_folder(tmp_path, real_model(), config)
    tokenizer = HfTokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (32005, (32003,))
    assert tokenizer.encode("x <tool> x")[1] == 32001 and tokenizer.encode("[PAD]").tolist() == [32004]
    for text in ADDED_TEXTS:
        assert tokenizer.encode(text).tolist() == transformers_ids(folder, text), text
    ids = tokenizer.encode("the<|im_end|>zqx<tool>[PAD]")
    assert (
        tokenizer.decode(ids) == transformers_tokenizer(folder).decode(ids, skip_special_tokens=True) == "thezqx<tool>"
    )


@LEGACY
def test_the_older_files_name_the_same_tokens(tmp_path, legacy):
    folder = write_folder(
        tmp_path,
        real_model(),
        {"legacy": legacy, "eos_token": "<s>"},
        added_tokens={"zqx": 32001, "<|im_end|>": 32000, "<tool>": 32002, "x<|im_end|>": 32003},
        special_tokens_map={"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "[PAD]"},
    )
    tokenizer = HfTokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (32005, (32000,))
    for text in ADDED_TEXTS:
        assert tokenizer.encode(text).tolist() == transformers_ids(folder, text), text
    assert tokenizer.decode(tokenizer.encode("the<|im_end|><tool>[PAD]")) == "the<tool>"


def test_only_legacy_puts_a_space_after_a_special_token():
    text = "the</s>answer"
    pieces = {
        legacy: [sentencepiece.SentencePieceProcessor(model_proto=real_model()).id_to_piece(int(i)) for i in ids]
        for legacy, ids in ((legacy, ours(real_model(), legacy).encode(text)) for legacy in (True, False))
    }
    assert pieces[True] == ["▁the", "</s>", "▁answer"]
    assert pieces[False] == ["▁the", "</s>", "answer"]


def test_a_missing_flag_is_read_as_transformers_reads_it(tmp_path):
    folder = write_folder(tmp_path, real_model(), {})
    ids = HfTokenizer(folder).encode("the</s>answer").tolist()
    assert (
        ids == transformers_ids(folder, "the</s>answer") == ours(real_model(), False).encode("the</s>answer").tolist()
    )


def test_no_prefix_where_the_folder_or_the_model_says_so(tmp_path):
    folder = write_folder(tmp_path / "folder", real_model(), {"add_prefix_space": False})
    without = HfTokenizer(folder)
    for text in ("the answer", "</s>the", " the", "the"):
        assert without.encode(text).tolist() == transformers_ids(folder, text)
        assert without.decode(without.encode(text)) == text.replace("</s>", "")
    model = HfTokenizer(write_folder(tmp_path / "model", train(add_dummy_prefix=False), {}))
    assert model.encode("the").tolist() != model.encode(" the").tolist()
    assert model.decode(model.encode(" the")) == " the"


def test_the_normalizer_of_the_model_is_ignored_as_in_transformers(tmp_path):
    model = train(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    assert sentencepiece.SentencePieceProcessor(model_proto=model).encode("ﬁ") != ours(model, True).encode("ﬁ").tolist()
    for text in NASTY:
        agree_with_the_published_tokenizer(model, text)
        agree_with_the_llama_tokenizer(model, text)


@LEGACY
def test_symbols_of_the_model_itself_are_cut_out_and_kept_in_text(tmp_path, legacy):
    model = train(user_defined_symbols=["<tool>"], control_symbols=["<|im_end|>"])
    folder = write_folder(tmp_path, model, {"legacy": legacy})
    tokenizer = HfTokenizer(folder)
    for text in ("the<tool>x", "x<|im_end|>the", "<tool>", "<tool>the<|im_end|>"):
        assert tokenizer.encode(text).tolist() == transformers_ids(folder, text), text
    assert tokenizer.decode(tokenizer.encode("the<tool><|im_end|>")) == "the<tool>"


def test_a_place_kept_free_in_the_model_takes_the_declared_name(tmp_path):
    model = train(user_defined_symbols=["<free0>", "<free1>"])
    declared = {"4": {**FLAGS, "content": "<|im_end|>"}}
    tokenizer = HfTokenizer(write_folder(tmp_path, model, {"added_tokens_decoder": declared}))
    assert tokenizer.encode("<|im_end|>").tolist() == [4]
    assert tokenizer.vocab_size == sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    assert 4 not in tokenizer.encode("<free1>") and tokenizer.decode(np.array([4])) == ""


def test_a_folder_with_nothing_but_the_model_ends_with_its_own_eos(tmp_path):
    tokenizer = HfTokenizer(write_folder(tmp_path, real_model()))
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (32000, (2,))
    assert tokenizer.encode("12").tolist() == ours(real_model(), False).encode("12").tolist()


def test_exactly_one_bos_where_the_template_writes_one(tmp_path):
    folder = write_folder(tmp_path, real_model(), {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"})
    ids = HfTokenizer(folder).encode("<s>the answer").tolist()
    assert ids[0] == 1 and ids.count(1) == 1 and 2 not in ids
    assert 1 not in HfTokenizer(folder).encode("the answer")


def test_several_eos_ids_are_honoured_and_no_text(tmp_path):
    folder = write_folder(tmp_path, real_model(), {"eos_token": "</s>"}, generation_config={"eos_token_id": [2, 28725]})
    tokenizer = HfTokenizer(folder)
    assert tokenizer.eos_ids == (2, 28725)
    assert tokenizer.decode(np.array([272, 28725, 2, 272])) == "the the"


def test_a_padded_model_is_accepted_and_its_unused_ids_are_no_text(tmp_path):
    folder = write_folder(tmp_path, real_model(), {}, config={"vocab_size": 32064})
    tokenizer = HfTokenizer(folder)
    assert tokenizer.vocab_size == 32000
    assert tokenizer.decode(np.array([272, 32063])) == "the"


def test_a_vocabulary_larger_than_the_model_is_refused_and_named(tmp_path):
    folder = write_folder(tmp_path, real_model(), {"pad_token": "[PAD]"}, config={"vocab_size": 32000})
    with pytest.raises(ModelError) as caught:
        HfTokenizer(folder)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{folder / 'tokenizer.model'}: the tokenizer needs 32001 ids, but {folder / 'config.json'}")
    assert "vocab_size 32000" in line and "(32000 '[PAD]')" in line and "resize_token_embeddings" in line


@pytest.mark.parametrize(
    ("model", "files", "message"),
    [
        (lambda: train(model_type="unigram"), {}, r"tokenizer\.model: a UNIGRAM model.*save.*tokenizer\.json"),
        (lambda: b"IQ== 0\nIg== 1\n", {}, r"tokenizer\.model: not a sentencepiece model"),
        (lambda: b"", {}, r"tokenizer\.model is empty; copy or download it again"),
        (lambda: b"version https://git-lfs.github.com/spec/v1", {}, r"tokenizer\.model is a git-lfs pointer"),
        (small_model, {"tokenizer_config": {"tokenizer_class": "GemmaTokenizer"}}, "tokenizer_class 'GemmaTokenizer'"),
        (small_model, {"tokenizer_config": {"tokenizer_class": "G\n" * 9000}}, "tokenizer_class 'G"),
        (
            lambda: train(user_defined_symbols=["z" * 300]),
            {"added_tokens": {"z" * 300: 5}},
            r"the added token 'z+\.\.\.z+' has the id 5",
        ),
        (
            small_model,
            {"added_tokens": {"</s>": 5}},
            "the added token '</s>' has the id 5, but tokenizer.model gives it 2",
        ),
        (small_model, {"added_tokens": {"a": 900, "b": 900}}, r"added_tokens\.json: two added tokens have the same id"),
        (small_model, {"added_tokens": {"a": "x"}}, r"added_tokens\.json: 'x' is not the id"),
        (small_model, {"tokenizer_config": {"added_tokens_decoder": ["a"]}}, "not an object of added tokens by id"),
    ],
    ids=[
        "unigram",
        "tiktoken",
        "empty",
        "pointer",
        "class",
        "long-class",
        "long-token",
        "contradiction",
        "same-id",
        "no-id",
        "no-object",
    ],
)
def test_what_cannot_be_read_faithfully_is_one_clear_line(tmp_path, model, files, message):
    with pytest.raises(ModelError, match=message) as caught:
        HfTokenizer(write_folder(tmp_path, model(), **files))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2 * len(str(tmp_path)) + 300


def test_an_eos_that_the_model_has_no_piece_for_is_none(tmp_path):
    protos: Any = sentencepiece_model_pb2
    model = protos.ModelProto.FromString(small_model())
    model.trainer_spec.eos_id = 10**6
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        HfTokenizer(write_folder(tmp_path, model.SerializeToString()))


def test_sentencepiece_is_imported_for_no_other_folder():
    code = (
        "import sys; from tba_megatron.models.tokenizer import HfTokenizer; HfTokenizer('configs/tiny_qwen2');"
        "raise SystemExit('sentencepiece' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=60)

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tba_megatron.errors import ModelError
from tba_megatron.models.tokenizer import HfTokenizer

FOLDER = Path(__file__).parents[2] / "configs" / "tiny_qwen2"
CHARACTERS = "0123456789+-*=; \n"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "model")


def write(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def real_folder(name):
    root = os.environ.get("TBA_TEST_DATA")
    if root is None or not (Path(root) / "tokenizers" / name).is_dir():
        pytest.skip(f"TBA_TEST_DATA names no folder with tokenizers/{name}")
    return Path(root) / "tokenizers" / name


def test_every_character_is_one_token_and_comes_back():
    tokenizer = HfTokenizer(FOLDER)
    ids = tokenizer.encode(CHARACTERS)
    assert ids.dtype == np.int32 and ids.tolist() == list(range(2, 19))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.encode("").tolist() == [] and tokenizer.decode(tokenizer.encode("")) == ""


def test_the_vocabulary_of_the_tiny_model_is_that_of_its_tokenizer():
    tokenizer = HfTokenizer(FOLDER)
    assert tokenizer.vocab_size == 19 == json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    assert tokenizer.eos_ids == (1,)


def test_eos_and_padding_are_not_part_of_the_text():
    assert HfTokenizer(FOLDER).decode(np.array([3, 4, 1, 0, 0])) == "12"


def test_an_added_padding_token_is_no_text_but_padding_with_plain_text_is(folder):
    added = {"id": 19, "content": "[PAD]", "special": False, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    write(folder, "tokenizer.json", added_tokens=[*tokens, added])
    write(folder, "config.json", vocab_size=20)
    assert HfTokenizer(folder).decode(np.array([3, 19, 4])) == "1[PAD]2"
    write(folder, "tokenizer_config.json", pad_token="[PAD]")
    assert HfTokenizer(folder).decode(np.array([3, 19, 4])) == "12"
    write(folder, "tokenizer_config.json", pad_token="1")
    assert HfTokenizer(folder).decode(np.array([3, 4])) == "12"


def test_a_model_with_more_rows_than_ids_is_accepted_and_they_are_no_text(folder):
    write(folder, "config.json", vocab_size=64)
    assert HfTokenizer(folder).vocab_size == 19
    assert HfTokenizer(folder).decode(np.array([3, 63, 4])) == "12"


def test_a_tokenizer_with_more_ids_than_the_model_is_one_clear_line(folder):
    write(folder, "config.json", vocab_size=18)
    with pytest.raises(ModelError) as caught:
        HfTokenizer(folder)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{folder / 'tokenizer.json'}: the tokenizer needs 19 ids, but {folder / 'config.json'} has")
    assert "vocab_size 18" in line and "(18 " in line and "resize_token_embeddings" in line
    write(folder, "config.json", vocab_size=5)
    with pytest.raises(ModelError, match=r"\(5 '3', 6 '4', 7 '5' and 11 more\)"):
        HfTokenizer(folder)


@pytest.mark.slow
def test_transformers_reads_the_tiny_folder_the_same_way():
    from transformers import AutoConfig, AutoTokenizer

    ours, theirs = HfTokenizer(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    assert theirs(CHARACTERS, add_special_tokens=False).input_ids == ours.encode(CHARACTERS).tolist()
    assert theirs.decode([3, 17, 18, 4, 1, 0], skip_special_tokens=True) == "1 \n2"
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (19, 1, 0)
    config = AutoConfig.from_pretrained(FOLDER)
    assert (config.architectures, config.vocab_size) == (["Qwen2ForCausalLM"], 19)
    assert config.hidden_size // config.num_attention_heads == 32
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_several_eos_ids_are_all_honoured(folder):
    write(folder, "generation_config.json", eos_token_id=[5, 7])
    tokenizer = HfTokenizer(folder)
    assert tokenizer.eos_ids == (5, 7, 1)
    assert tokenizer.decode(np.array([3, 5, 4, 7, 1])) == "12"


def test_config_json_is_asked_where_the_generation_config_is_silent(folder):
    (folder / "generation_config.json").unlink()
    write(folder, "config.json", eos_token_id=6)
    write(folder, "tokenizer_config.json", eos_token={"content": "<eos>"})
    assert HfTokenizer(folder).eos_ids == (6, 1)


def test_the_eos_of_an_older_special_tokens_map_counts(folder):
    write(folder, "generation_config.json", eos_token_id=5)
    write(folder, "tokenizer_config.json", eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert HfTokenizer(folder).eos_ids == (5, 1)


def test_stored_truncation_and_padding_do_not_touch_a_prompt(folder):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(folder, "tokenizer.json", truncation=truncation)
    assert len(HfTokenizer(folder).encode("12345")) == 5


def test_no_bos_is_added_where_the_tokenizer_has_one(folder):
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
    }
    write(folder, "tokenizer.json", post_processor=processor)
    assert HfTokenizer(folder).encode("1").tolist() == [3]


def test_a_folder_without_a_tokenizer_is_one_clear_line(folder, tmp_path):
    with pytest.raises(ModelError, match=r"nowhere: no tokenizer\.json and no tokenizer\.model; copy one"):
        HfTokenizer(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        HfTokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        HfTokenizer(folder)


def line(folder) -> str:
    with pytest.raises(ModelError) as caught:
        HfTokenizer(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2 * len(str(folder)) + 400
    return str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "is nested too deeply to be read; copy or download it again"),
        (b"", "is empty; copy or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer and not the file; run git lfs pull in"),
        (b"\xef\xbb\xbf{}", "has a byte order mark or is UTF-16; save it as UTF-8 without"),
        ("{}".encode("utf-16"), "has a byte order mark or is UTF-16; save it as UTF-8 without"),
        (b"[]", "is not a JSON object; copy or download it again"),
        (b"{", "is not JSON (Expecting property name"),
    ],
    ids=["deep", "empty", "pointer", "mark", "utf-16", "list", "cut"],
)  # fmt: skip
def test_a_file_that_is_no_json_object_is_one_line_with_what_to_do(folder, name, content, words):
    (folder / name).write_bytes(content)
    assert line(folder).startswith(f"{folder / name} {words}")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "generation_config.json"])
def test_what_is_no_file_is_one_line_with_what_to_do(folder, name):
    (folder / "tokenizer.json").rename(folder / "elsewhere")
    if name == "generation_config.json":
        (folder / "elsewhere").rename(folder / "tokenizer.json")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert line(folder) == f"{folder / name} is a folder and not a file; remove or replace it"
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    assert line(folder) == f"{folder / name} is a pipe, socket or device and not a file; remove or replace it"


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("odd", [True, False, [True], {"a": 1}, [[1]], [1, None], "1", 1.0, "x" * 9000, {}, ""])
def test_an_eos_that_is_no_id_is_one_line(folder, name, odd):
    (folder / "generation_config.json").write_text("{}")
    write(folder, name, eos_token_id=odd)
    assert line(folder).startswith(f"{folder / name}: eos_token_id ")
    assert "is neither a token id nor a list of them" in line(folder)


def test_an_eos_by_a_name_that_no_token_has_is_one_line(folder):
    for text in ("<|none|>", "x\n" * 5000):
        write(folder, "tokenizer_config.json", eos_token=text)
        assert f"{folder}: the eos_token " in line(folder) and "is not in the vocabulary" in line(folder)


def test_a_tokenizer_without_tokens_is_one_line(folder):
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    assert line(folder) == (
        f"{folder / 'tokenizer.json'}: not a tokenizer, because its vocabulary is empty; download it again"
    )


@pytest.mark.parametrize("odd", ["9" * 5000, "0" * 5000, "2147483648", "x" * 9000, "", "-1", "1.5", "a\nb"])
def test_an_added_token_under_no_id_is_one_line(folder, odd):
    write(folder, "tokenizer_config.json", added_tokens_decoder={odd: {"content": "<a>"}})
    assert line(folder).startswith(f"{folder / 'tokenizer_config.json'}: ")
    assert "is not the id of an added token; ids are whole numbers from 0" in line(folder)


@pytest.mark.parametrize("odd", [-1, 1.5, True, None, [], {}, 2**31, "\n" * 9000])
def test_an_added_token_with_no_id_is_one_line(folder, odd):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": odd}))
    assert line(folder).startswith(f"{folder / 'added_tokens.json'}: ")
    assert "is not the id of an added token" in line(folder)


def test_a_token_that_is_no_unicode_text_is_one_line(folder):
    write(folder, "tokenizer_config.json", eos_token="\ud800")
    assert line(folder).startswith(
        f"{folder}: the token '\\ud800' of tokenizer_config.json, special_tokens_map.json or"
    )


def test_a_long_token_without_a_row_does_not_flood_the_line(folder):
    added = {"id": 19, "content": "x\n" * 9000, "special": False, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    write(folder, "tokenizer.json", added_tokens=[added])
    assert "needs 20 ids" in line(folder)


def test_a_model_without_eos_or_with_one_outside_the_vocabulary_is_refused(folder):
    write(folder, "generation_config.json", eos_token_id=19)
    with pytest.raises(ModelError, match=r"\[19, 1\] are not all in the vocabulary of 19"):
        HfTokenizer(folder)
    write(folder, "generation_config.json", eos_token_id=None)
    write(folder, "config.json", eos_token_id=None)
    write(folder, "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        HfTokenizer(folder)


@pytest.mark.parametrize(
    ("name", "vocab_size", "eos"), [("qwen3", 151669, "<|im_end|>"), ("gpt2_fast", 50257, "<|endoftext|>")]
)
def test_real_tokenizers_round_trip(name, vocab_size, eos):
    tokenizer = HfTokenizer(real_folder(name))
    assert tokenizer.vocab_size == vocab_size
    text = "Héllo, 12+7=19!\n\n  “日本語” 👋🏽 ½ cup\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(eos).tolist() == [tokenizer.eos_ids[0]]


def test_a_real_folder_of_the_slow_tokenizer_alone_is_refused():
    with pytest.raises(ModelError, match=r"gpt2: no tokenizer\.json.*save_pretrained"):
        HfTokenizer(real_folder("gpt2"))


def test_a_real_tokenizer_fits_a_padded_model_and_no_smaller_one(tmp_path):
    folder = shutil.copytree(real_folder("qwen3"), tmp_path / "qwen3")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 151936}))
    assert HfTokenizer(folder).vocab_size == 151669
    (folder / "config.json").write_text(json.dumps({"vocab_size": 151643}))
    with pytest.raises(ModelError, match=r"151643 '<\|endoftext\|>', .* and 23 more"):
        HfTokenizer(folder)


def test_a_damaged_tokenizer_json_is_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": 3}}')
    with pytest.raises(ModelError) as caught:
        HfTokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: not a tokenizer (")
    assert "\n" not in str(caught.value)

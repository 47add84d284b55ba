"""Small chat templates that render and refuse the same messages as well-known models'."""

from __future__ import annotations

CHATML = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}\n{{ tool | tojson }}"
    "{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{%- endfor %}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As in Qwen2.5's: every role, in order."""

LLAMA3 = (
    "{%- if tools is defined and tools %}<|im_start|>ipython\n{{ tools | tojson }}<|im_end|>"
    "{%- if not messages %}{{ raise_exception('Cannot put tools in no message!') }}{%- endif %}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>"
    "{%- elif 'tool_calls' in m %}"
    "{%- if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '<|im_start|>assistant\n\n{"name": "{{ call.name }}", '
    '"parameters": {{ call.arguments | tojson }}}<|im_end|>'
    "{%- else %}<|im_start|>ipython\n\n"
    "{%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}"
    "{%- else %}{{ m.content }}{%- endif %}<|im_end|>"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
"""As in Llama 3.1's: one call a message, and an empty list of calls is refused."""

MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set ns = namespace(n=0) %}{%- for m in rest %}"
    "{%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate') }}"
    "{%- endif %}{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for m in rest %}"
    "{%- if m.role == 'user' %}[INST]"
    "{%- if loop.first and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][ "
    "{%- for call in m.tool_calls %}"
    "{%- set out = call.function | tojson %}{{ out[:-1] }}"
    "{%- if call.id is not defined or call.id is none or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{%- endif %}, "id": "{{ call.id }}"}'
    "{%- if not loop.last %}, {% else %}]<|im_end|>{% endif %}{%- endfor %}"
    "{%- elif m.role == 'assistant' %} {{ m.content }}<|im_end|>"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id is not defined or m.tool_call_id is none"
    " or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{%- endif %}[TOOL_RESULTS]{"content": {{ m.content }}, '
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}"
    "{%- endif %}{%- endfor %}"
)
"""As in Mistral Nemo's: roles alternate, ids have nine characters, content beside calls is left
out."""

GEMMA = (
    "{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set first = '' %}{%- set rest = messages %}"
    "{%- endif %}{%- for m in rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{%- endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}"
    "{%- if m.content is string %}{{ m.content | trim }}"
    "{%- else %}{{ raise_exception('Invalid content type') }}{%- endif %}<|im_end|>\n"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
"""As in Gemma 3's: roles alternate, and there are no calls or results."""

QWEN_CODER = (
    "{%- if tools is iterable and tools | length > 0 %}<|im_start|>system\n# Tools\n"
    "{%- for tool in tools %}\n<function>{{ tool.function.name }}</function>{%- endfor %}"
    "<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable"
    " and m.tool_calls | length > 0 %}<|im_start|>assistant"
    "{%- if m.content is string and m.content | trim | length > 0 %}\n{{ m.content | trim }}\n"
    "{%- endif %}"
    "{%- for call in m.tool_calls %}{%- set call = call.function %}\n<tool_call>\n"
    "<function={{ call.name }}>\n"
    "{%- if call.arguments is defined %}{%- for name, value in call.arguments | items %}\n"
    "<parameter={{ name }}>\n{{ value | tojson if value is mapping else value | string }}\n"
    "</parameter>{%- endfor %}{%- endif %}\n</function>\n</tool_call>{%- endfor %}<|im_end|>\n"
    "{%- elif m.role in ('user', 'system', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user\n{%- endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As in Qwen3-Coder's: a call's arguments must be an object."""

HARMONY = (
    "{%- if messages[0].role in ('system', 'developer') %}"
    "<|start|>developer<|message|>{{ messages[0].content }}<|end|>"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set ns = namespace(name=none) %}{%- for m in rest %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if '<|channel|>' in (m.content or '') %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags') }}{%- endif %}"
    "{%- if 'tool_calls' in m %}{%- set call = m.tool_calls[0] %}"
    "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{%- if m.content and (m.thinking or m.reasoning_content) %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message!') }}"
    "{%- elif m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{%- elif m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.reasoning_content }}<|end|>{%- endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{%- set ns.name = call.name %}"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|im_end|>"
    "{%- set ns.name = none %}{%- endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if ns.name is none %}"
    "{{ raise_exception('Message has tool role, but there was no previous tool call!') }}"
    "{%- endif %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As in gpt-oss's: no result without a call, no reasoning beside content and calls. Other system
messages than the first are left out."""

QUERY = (
    "{%- set ns = namespace(asked=false) %}{%- for m in messages %}"
    "{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{%- set ns.asked = true %}{%- endif %}"
    "{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{%- endfor %}{%- if not ns.asked %}{{ raise_exception('No user query found in messages.') }}"
    "{%- endif %}"
) + CHATML
"""As in Qwen3.5's."""

COUNTED = (
    "{%- set ns = namespace(open=0) %}{%- for m in messages %}"
    "{%- if m.tool_calls %}{%- set ns.open = ns.open + m.tool_calls | length %}"
    "{%- elif m.role == 'tool' %}{%- set ns.open = ns.open - 1 %}{%- endif %}"
    "{%- if ns.open < 0 or (ns.open and m.role != 'tool' and not m.tool_calls) %}"
    "{{ raise_exception('Not the same number of function calls and responses') }}{%- endif %}"
    "{%- endfor %}"
) + MISTRAL
"""As in Mistral's newer templates: each call must have one result before the next message."""

APART = CHATML.replace(
    "{%- if m.role == 'tool' %}",
    "{%- if m.tool_calls and m.content %}{{ raise_exception('Content beside calls!') }}"
    "{%- elif m.role == 'tool' %}",
)
"""Content beside calls is refused."""

STRINGS = CHATML.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments + '' }}"
)
"""As in DeepSeek R1's: a call's arguments must be a text."""

SHAPES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen-coder": QWEN_CODER,
    "harmony": HARMONY,
}
"""The templates of the models that are used most, by their kind."""
OTHERS = {"query": QUERY, "counted": COUNTED, "apart": APART, "strings": STRINGS}

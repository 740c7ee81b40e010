"""A chat template with the form of Gemma 4's of July 2026, written for these tests: what it shows, in fewer words.

It leaves out images, nested schemas and the results of functions in a schema. `BEGUN` is the empty channel with which
the larger models begin an answer without reasoning; templates of the smaller ones do not have it.
"""

from __future__ import annotations

from typing import Final

BEGUN: Final = "{%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}"
FORM: Final = r"""
{%- macro value_of(value) -%}
    {%- if value is none -%} null
    {%- elif value is string -%} {{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%} {{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%} {{- '{' -}} {{- pairs_of(value) -}} {{- '}' -}}
    {%- elif value is sequence -%}
        [ {%- for item in value -%} {{- ',' if not loop.first -}} {{- value_of(item) -}} {%- endfor -%} ]
    {%- else -%} {{- value -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro pairs_of(values) -%}
    {%- for key, value in values | dictsort -%}
        {{- ',' if not loop.first -}} {{- key -}} : {{- value_of(value) -}}
    {%- endfor -%}
{%- endmacro -%}
{%- macro declaration_of(function) -%}
    {{- 'declaration:' + function['name'] + '{description:' + value_of(function['description']) -}}
    {%- set parameters = function['parameters'] -%}
    {{- ',parameters:{' -}}
    {%- if parameters['properties'] -%}
        {{- 'properties:{' -}}
        {%- for key, field in parameters['properties'] | dictsort -%}
            {{- ',' if not loop.first -}} {{- key + ':{type:' + value_of(field['type'] | upper) + '}' -}}
        {%- endfor -%}
        {{- '},' -}}
    {%- endif -%}
    {%- if parameters['type'] -%} {{- 'type:' + value_of(parameters['type'] | upper) + '}' -}} {%- endif -%}
    {{- '}' -}}
{%- endmacro -%}
{%- macro response_of(name, text) -%}
    {{- '<|tool_response>response:' + name + '{value:' + value_of(text) + '}<tool_response|>' -}}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
    {%- set found = namespace(text='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set found.text = found.text + part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- found.text | trim -}}
{%- endmacro -%}
{%- set enable_thinking = enable_thinking | default(false) -%}
{%- set rest = messages -%}
{%- set last = namespace(role='', part='') -%}
{{- bos_token -}}
{%- if enable_thinking or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking -%} {{- '<|think|>\n' -}} {%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}
        {%- set rest = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>' -}} {{- declaration_of(tool['function']) | trim -}} {{- '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in rest -%}
    {%- if message['role'] != 'tool' -%}
        {%- set last.part = '' -%}
        {%- if not (message['role'] == 'assistant' and last.role == 'assistant') -%}
            {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' -}}
        {%- endif -%}
        {%- if message.get('reasoning_content') -%}
            {{- '<|channel>thought\n' + message['reasoning_content'] + '\n<channel|>' -}}
        {%- endif -%}
        {%- for call in message.get('tool_calls') or [] -%}
            {{- '<|tool_call>call:' + call['function']['name'] + '{' -}}
            {{- pairs_of(call['function']['arguments']) -}}
            {{- '}<tool_call|>' -}}
            {%- set last.part = 'call' -%}
        {%- endfor -%}
        {%- if message.get('tool_responses') -%}
            {%- for each in message['tool_responses'] -%}
                {{- response_of(each['name'], each['response']) -}}
                {%- set last.part = 'response' -%}
            {%- endfor -%}
        {%- elif message.get('tool_calls') -%}
            {%- set scan = namespace(is_over=false) -%}
            {%- for follow in rest[loop.index0 + 1:] -%}
                {%- set scan.is_over = scan.is_over or follow['role'] != 'tool' -%}
                {%- if not scan.is_over -%}
                    {%- set found = namespace(name='unknown') -%}
                    {%- for call in message['tool_calls'] -%}
                        {%- if call.get('id') == follow.get('tool_call_id') -%}
                            {%- set found.name = call['function']['name'] -%}
                        {%- endif -%}
                    {%- endfor -%}
                    {{- response_of(found.name, follow['content']) -}}
                    {%- set last.part = 'response' -%}
                {%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {%- set said -%}
            {{- without_thoughts(message['content'] or '') if message['role'] == 'assistant' -}}
            {{- message['content'] | trim if message['role'] != 'assistant' -}}
        {%- endset -%}
        {{- said -}}
        {%- if last.part == 'call' -%} {{- '<|tool_response>' -}}
        {%- elif last.part != 'response' or said -%} {{- '<turn|>\n' -}}
        {%- endif -%}
        {%- set last.role = message['role'] -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if not last.part -%} {{- '<|turn>model\n' -}} BEGUN
    {%- elif last.part == 'response' and enable_thinking -%} {{- '<|channel>thought\n' -}}
    {%- endif -%}
{%- endif -%}
"""
SMALL: Final = FORM.replace(" BEGUN", "")
LARGE: Final = FORM.replace(" BEGUN", BEGUN)

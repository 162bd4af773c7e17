"""Rendering a checkpoint's chat template: Jinja, in the sandbox and with the helpers that templates are written for."""

import datetime
import functools
import json

import jinja2
import jinja2.ext
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training masks; here it only passes its contents on."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise ValueError(f"The chat template refuses these messages: {message}")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template must be Jinja that compiles; got an error: {error}.") from error


def render(template: str, messages: list[dict], *, add_generation_prompt: bool, special_tokens: dict[str, str]) -> str:
    """The prompt that a template makes of messages.

    Args:
        template: Jinja source.
        messages: dicts with "role" and "content".
        add_generation_prompt: whether to end with the opening of the assistant's turn.
        special_tokens: put in scope by name, such as "bos_token".

    Raises:
        ValueError: the template does not compile, fails, or refuses the messages.
    """
    scope = {"tools": None, "documents": None, **special_tokens}
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **scope)
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template cannot take these messages: {error}.") from error

"""Reading the metadata of a GGUF file."""

from typing import Any

_REQUIRED = object()


def read(reader, key: str, default: Any = _REQUIRED) -> Any:
    """The value of a metadata key of a `gguf.GGUFReader`: a number, bool, string, or a list of them.

    Raises:
        ValueError: the file lacks the key and no default is given.
    """
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise ValueError(f"The GGUF file must have the field {key}; it does not.")
    return default

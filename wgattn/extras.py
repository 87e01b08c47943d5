"""Packages that only an extra of ours installs."""

import importlib
from types import ModuleType

from .errors import Unsupported


def load_extra(name: str, extra: str = "gguf") -> ModuleType:
    """Import a package of an extra; Unsupported names the extra when it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(f"This needs the package {name.partition('.')[0]}; run: pip install 'wgattn[{extra}]'.") from error

"""Where a configured path lies: in the file system, or bundled with an installed package.

Configs name bundled files as ``package:blockgrow_titan/assets/...``, so that the same TOML works from any folder and
from an installed wheel. Everything that opens a configured path (tokenizer, teacher, documents) resolves it here first.
"""

import json
import os
from importlib.resources import files
from typing import Any

PACKAGE_PREFIX = "package:"


def resolve(path: str, field: str = "path") -> str:
    """Return the absolute path of an existing file or folder.

    Args:
        path: ``package:<package>/<path inside it>``, or a path in the file system; a relative one is taken against the
            current folder, and ``~`` is the home folder.
        field: The config field that holds ``path``, for the error's text.

    Raises:
        ValueError: If ``path`` is empty, its package cannot be imported, or nothing is there; the text has the field,
            its value and the resolved path.
    """
    if not path:
        raise ValueError(f'{field} is empty; set it to a path or to "{PACKAGE_PREFIX}<package>/<path inside it>"')
    if path.startswith(PACKAGE_PREFIX):
        package, _, inside = path.removeprefix(PACKAGE_PREFIX).partition("/")
        try:
            resolved = str(files(package).joinpath(inside))
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(f'{field} = "{path}": "{package}" is not an importable package ({error})') from error
    else:
        resolved = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(resolved):
        raise ValueError(
            f'{field} = "{path}": there is no file or folder {resolved}; relative paths are taken against the current '
            f'folder, bundled ones start with "{PACKAGE_PREFIX}"'
        )
    return resolved


def read_json_object(path: str, remedy: str) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Args:
        path: The file.
        remedy: What the error advises.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8, or holds anything else; the text names it, in one line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8, numbers too long, lists too deep
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: {remedy}")
    return value

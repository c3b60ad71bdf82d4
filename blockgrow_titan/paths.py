"""Where a configured path lies: in the file system, or bundled with an installed package.

Configs name bundled files as ``package:blockgrow_titan/assets/...``, so that the same TOML works from any folder and
from an installed wheel. Everything that opens a configured path (tokenizer, teacher, documents) resolves it here first.
"""

import os
from importlib.resources import files

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
        except (ModuleNotFoundError, ValueError) as error:
            raise ValueError(f'{field} = "{path}": "{package}" is not an importable package ({error})') from error
    else:
        resolved = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(resolved):
        raise ValueError(
            f'{field} = "{path}": there is no file or folder {resolved}; relative paths are taken against the current '
            f'folder, bundled ones start with "{PACKAGE_PREFIX}"'
        )
    return resolved

"""Bytecode that depends only on its source, so that a check can recompute and compare it. A part of setup_release.py.

What `compileall` writes depends on the process that wrote it: the marshal format marks the objects that happen to be
shared. Version 2 of the format has no such marks, so the same source, path and Python always give the same file.
"""

import hashlib
import importlib.util
import marshal
import os
import re
import sys
import warnings

from offline_bundle.medium.code_tree.tools import in_processes

# Modules that a serving process does not import. They still work, only without precompiled bytecode.
NOT_COMPILED = re.compile(
    r"/(tests?|sympy|networkx|mpmath|setuptools|torchgen|functorch|huggingface_hub)/"
    r"|/torch/(_inductor|testing|onnx)/"
)
_UNCHECKED_HASH = 1  # the import system does not look at the source to judge its age (PEP 552)
_FORMAT = 2


def bytecode(source, path):
    """The .pyc file of `source` (bytes) at `path`; None for templates that are not Python, and for code without a fixed
    form (Python 3.14 has constants that version 2 of the format cannot hold; such modules are compiled on import).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source, path, "exec", dont_inherit=True, optimize=0)
        body = marshal.dumps(code, _FORMAT)
    except (SyntaxError, ValueError, RecursionError):
        return None
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    return head + importlib.util.source_hash(source) + body


def bytecode_path(path):
    """Where the import system looks for the bytecode of the module at `path`."""
    directory, name = os.path.split(path)
    return os.path.join(directory, "__pycache__", f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc")


def make_bytecode(tree, final, paths, done=lambda count: None):
    """Write the bytecode of `paths` (modules below `tree`, which will be moved to `final`).

    Durable only after a sync. Raises OSError.
    """

    def make(path):
        with open(os.path.join(tree, path), "rb") as file:
            data = bytecode(file.read(), os.path.join(final, path))
        target = bytecode_path(os.path.join(tree, path))
        if data is None:
            return
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        with open(target + ".partial", "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o444)
        os.rename(target + ".partial", target)

    in_processes(make, [path for path in paths if not NOT_COMPILED.search(f"/{path}")], done)


def differing_bytecode(tree, place, modules, done=lambda count: None):
    """Bytecode below `tree` that differs from what its module compiles to.

    `modules`: path -> SHA-256 of the verified source; `place`: the path of the tree that the bytecode was made for.

    It is never loaded or parsed, only compared with freshly compiled bytecode. Raises OSError.
    """

    def compare(path):
        cached = bytecode_path(os.path.join(tree, path))
        try:
            fd = os.open(cached, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            return os.path.relpath(cached, tree)
        with open(fd, "rb") as there, open(os.path.join(tree, path), "rb") as file:
            source = file.read()
            expected = bytecode(source, os.path.join(place, path))
            if expected is not None and hashlib.sha256(source).hexdigest() == modules[path]:
                found = there.read(len(expected) + 1)
                if found == expected:
                    return None
        return os.path.relpath(cached, tree)

    return in_processes(compare, list(modules), done)

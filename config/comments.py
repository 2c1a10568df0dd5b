"""The meaning of a field is the comment beside it in the source, so that it is written once, where the reader is."""

import ast
import functools
import inspect
import io
import textwrap
import tokenize


@functools.cache
def meanings(cls: type) -> dict[str, str]:
    """Field name -> the comment at the end of its line, or the comment lines right above it; inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__annotations__" in vars(base):
            try:
                source = inspect.getsource(base)
            except OSError:  # typed into an interpreter: there is no source to read
                continue
            found |= _meanings_in(textwrap.dedent(source))
    return found


def _meanings_in(source: str) -> dict[str, str]:
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    definition = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        last = node.end_lineno or node.lineno
        texts = [comments[line] for line in range(node.lineno, last + 1) if line in comments]
        if not texts:
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            texts = [comments[line] for line in range(first, node.lineno)]
        found[node.target.id] = " ".join(texts)
    return found

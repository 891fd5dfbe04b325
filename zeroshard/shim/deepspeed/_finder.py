"""Owns the creation of this package's modules, from their files and from the table in `_names`.

Importing this module adds one hook to `sys.path_hooks`. The hook accepts only this package's folders, so it does not
affect other packages.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from deepspeed._names import TABLE, Row

ROOT = Path(__file__).parent
_ADVICE = "It has the names of DeepSpeed 0.19.8 that trainers use. `import zeroshard` has more, under its own names."


def fill(module: ModuleType) -> None:
    """Add to a module the names of its row, `__all__`, and a `__getattr__` for names that are not supported."""
    row = TABLE.get(module.__name__, Row())
    own = vars(module)
    defined = [name for name, value in own.items() if not name.startswith("_") and _is_of(value, module.__name__)]
    own["__getattr__"] = _missing(module.__name__, row)
    own.update(row.values)
    refused = {name: _refused(name, instead) for name, instead in _each(row.refused).items()}
    own.update(refused)
    public = [*defined, *row.values, *refused]
    for home, name, theirs in _places(row.names):
        # Like `from home import theirs`, which also imports modules.
        value = getattr(__import__(home, fromlist=[theirs]), theirs)
        if home.startswith("deepspeed._") and _is_of(value, home):
            # Pickles refer to the object by DeepSpeed's name. Python 3.13 drops the line of a class whose `__module__` is changed.
            line = vars(value).get("__firstlineno__")
            value.__module__ = module.__name__
            value.__qualname__ = name
            if line is not None:
                value.__firstlineno__ = line
        own[name] = value
        public.append(name)
    own["__all__"] = list(dict.fromkeys(public))


def _is_of(value: object, module: str) -> bool:
    return hasattr(value, "__qualname__") and getattr(value, "__module__", None) == module


def _places(names: str) -> Iterator[tuple[str, str, str]]:
    home = ""
    for word in names.split():
        name, _, theirs = word.partition("=")
        if word.endswith(":"):
            home = f"deepspeed{word[:-1]}" if word.startswith(".") else word[:-1]
        elif word == "*":
            yield from ((home, name, name) for name in import_module(home).__all__)
        else:
            yield home, name, theirs or name


def _each(sentences: Mapping[str, str]) -> dict[str, str]:
    return {name: sentence for names, sentence in sentences.items() for name in names.split()}


def _missing(module: str, row: Row) -> Callable[[str], Any]:
    """Return a module's `__getattr__` (PEP 562), which imports submodules. Its error names a replacement."""
    instead = _each(row.instead)

    def getattr_(name: str) -> Any:
        if row.otherwise and not name.startswith("_") and hasattr(sys.modules[row.otherwise], name):
            return getattr(sys.modules[row.otherwise], name)
        if f"{module}.{name}" in TABLE:
            return import_module(f"{module}.{name}")
        text = f"zeroshard has no {module}.{name}. {instead.get(name, _ADVICE)}"
        # `from module import name` swallows an AttributeError together with its message.
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM" and not name.startswith("__"):
            raise ImportError(text, name=module)
        raise AttributeError(text, name=name)

    getattr_.instead = instead  # type: ignore[attr-defined]  # for the test that reads the trainers' sources
    return getattr_


def _refused(name: str, instead: str) -> type[Any]:
    """Return a class for `isinstance`, whose instances cannot be created. The error names a replacement."""

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"zeroshard has no {name}. {instead}")

    return type(name, (), {"__init__": init, "__doc__": f"Not offered. {instead}", "__module__": "deepspeed"})


class Loader(SourceFileLoader):
    """An object that loads a module for importlib: it runs the module's own file, if any, and adds the names of its row."""

    def exec_module(self, module: ModuleType) -> None:
        if Path(self.path).stem == self.name.rpartition(".")[2]:
            super().exec_module(module)
        fill(module)


class Folder(PathEntryFinder):
    """An object that finds a package's modules for importlib. The package need not have a folder.

    Raises:
        ImportError: the path is not in this package, so that Python tries the next hook.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_relative_to(ROOT):
            raise ImportError(f"{path} is not in {ROOT}", path=path)
        self._path = Path(path)
        self._package = ".".join(("deepspeed", *self._path.relative_to(ROOT).parts))
        self._files = FileFinder(path, (Loader, SOURCE_SUFFIXES))

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != self._package:
            return None
        spec = self._files.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            return spec
        if fullname not in TABLE:
            return None
        # inspect.getsource looks for a class in its module's file.
        code = next((word[1:-1] for word in TABLE[fullname].names.split() if word.startswith("._")), "_names")
        below = [str(self._path / name)] if self._is_package(name) else None
        file = str(ROOT / f"{code}.py")
        return spec_from_file_location(fullname, file, loader=Loader(fullname, file), submodule_search_locations=below)

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yield the name of each module, and whether it is a package, for pkgutil."""
        rows = {row.rpartition(".")[2] for row in TABLE if row.rpartition(".")[0] == self._package}
        files = {path.stem for path in self._path.glob("*.py")} - {"__init__"}
        for name in sorted(rows | files):
            yield prefix + name, self._is_package(name)

    def _is_package(self, name: str) -> bool:
        return (self._path / name).is_dir() or any(row.startswith(f"{self._package}.{name}.") for row in TABLE)


# Add the hook only once, even if the package is imported again. Python has cached another finder for this folder: remove it.
sys.path_hooks[:] = [Folder, *(hook for hook in sys.path_hooks if getattr(hook, "__module__", None) != __name__)]
sys.path_importer_cache.pop(str(ROOT), None)

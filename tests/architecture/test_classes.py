"""Classes are abstract or final: none inherits from a concrete one of ours, nor overrides what is implemented."""

import ast


def name_of(node: ast.expr) -> str:
    """The last name of a base class: `Objective` for `base.Objective` or `Objective[T]`."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def methods(cls: ast.ClassDef) -> dict[str, bool]:
    """The class's own methods: name -> whether it is abstract."""
    return {
        node.name: any(name_of(decorator) == "abstractmethod" for decorator in node.decorator_list)
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def is_abstract(cls: ast.ClassDef) -> bool:
    """Whether it says so itself: by a base (ABC, Protocol) or an abstract method."""
    return any(name_of(base) in ("ABC", "Protocol") for base in cls.bases) or any(methods(cls).values())


def broken(sources) -> list[str]:
    """Every inheritance from a concrete class of ours, and every overriding of an implemented method."""
    classes = {
        node.name: node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    }
    found = []
    for cls in classes.values():
        for base in [classes[name_of(base)] for base in cls.bases if name_of(base) in classes]:
            if not is_abstract(base):
                found.append(f"{cls.name} inherits from {base.name}, which is not abstract")
            for name, abstract in methods(base).items():
                if not abstract and not name.startswith("__") and name in methods(cls):
                    found.append(f"{cls.name}.{name} overrides what {base.name} implements")
    return found


def test_classes_are_abstract_or_final(sources):
    assert not broken(sources)


def test_wrong_classes_are_seen(parsed):
    concrete = "class A:\n    x = 1\nclass B(A):\n    y = 2\n"
    override = "class A(abc.ABC):\n    def f(self): return 1\nclass B(A):\n    def f(self): return 2\n"
    right = "class A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass B(A):\n    def f(self): return 2\n"
    counts = [len(broken([parsed("src/diladiff/x.py", text)])) for text in (concrete, override, right)]
    assert counts == [1, 1, 0]

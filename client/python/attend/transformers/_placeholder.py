# SPDX-License-Identifier: Apache-2.0
"""A stand-in where a model expects a tensor."""


class Placeholder:
    """Passed on by a model to its attention; refuses all other tensor operations, because computing
    with it would give another answer than the model's own."""

    refusal = ""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(cls.refusal)

    def _refuse(self, *_):
        raise TypeError(self.refusal)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _refuse

    def __getattr__(self, name):
        if name.startswith("__"):  # protocol look-ups by Python itself
            raise AttributeError(name)
        raise AttributeError(f"{name}: {self.refusal}")

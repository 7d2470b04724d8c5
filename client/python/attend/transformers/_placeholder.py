# SPDX-License-Identifier: Apache-2.0
"""What stands in a model where it expects a tensor."""


class Placeholder:
    """Is handed on by a model to its attention, and refuses whatever else a model does with a
    tensor: computing with it would give another answer than the model's own."""

    refusal = ""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(cls.refusal)

    def _refuse(self, *_):
        raise TypeError(self.refusal)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _refuse

    def __getattr__(self, name):
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise AttributeError(f"{name}: {self.refusal}")

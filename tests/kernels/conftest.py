"""Triton's kernels run without a GPU: in its interpreter."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """As NumPy wants it since 2.4: an array of one element is no number by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            from triton.runtime import interpreter

            once = interpreter._patch_lang_tensor

            def with_index(tensor: type, scope: object) -> None:
                once(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

            patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield
